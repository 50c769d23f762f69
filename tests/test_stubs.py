"""The committed stubs are what the contract generates, and the contract is in order."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.test_setup import PROJECT

ROOT = Path(__file__).resolve().parents[1]
BUF = Path(sys.executable).parent / "buf"
BUF_IS_THERE = pytest.mark.skipif(not BUF.exists(), reason=f"{BUF} is absent: pip install buf-bin")
GENERATOR = Path(sys.prefix) / "stub-generator"
GENERATOR_IS_THERE = pytest.mark.skipif(not GENERATOR.exists(), reason=f"{GENERATOR} is absent: make setup")
IT_GENERATES = pytest.mark.skipif(sys.version_info >= (3, 14), reason="the generator has no wheel for this Python")


def run(*command: str | Path, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = os.environ if path is None else {**os.environ, "PYTHONPATH": str(path)}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, env=environment)


def files_under(folder: Path) -> dict[str, bytes]:
    stubs = (path for path in folder.rglob("*") if path.suffix in {".py", ".pyi"})
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in stubs}


@IT_GENERATES
@GENERATOR_IS_THERE
def test_the_committed_stubs_are_what_the_contract_generates(tmp_path):
    protos = sorted(path.relative_to(ROOT / "proto") for path in (ROOT / "proto").rglob("*.proto"))
    outputs = (f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python"))
    result = run(sys.executable, "-m", "grpc_tools.protoc", "-Iproto", *outputs, *protos, path=GENERATOR)
    assert result.returncode == 0, result.stderr
    generated, committed = files_under(tmp_path / "tandem" / "v1"), files_under(ROOT / "tandem" / "v1")
    assert len(generated) == 3 * len(protos)
    assert sorted(committed) == sorted(generated), "run `make proto`"
    assert [name for name in generated if committed[name] != generated[name]] == [], "run `make proto`"


@GENERATOR_IS_THERE
def test_the_stubs_work_on_the_oldest_protobuf_that_is_promised():
    """The generator's folder holds it; servers here run with a later one."""
    (promised,) = [line for line in PROJECT["dependencies"] if line.startswith("protobuf")]
    names = sorted(path.stem for path in (ROOT / "tandem" / "v1").glob("*_pb2*.py"))
    work = (
        "import google.protobuf; print(google.protobuf.__version__)\n"
        f"import importlib\nfor name in {names}: importlib.import_module(f'tandem.v1.{{name}}')\n"
        "from tandem.rpc import wire\nfrom tandem.speculation.types import GenerationRequest\n"
        "from tandem.v1 import generation_pb2\n"
        "request = GenerationRequest(text='a')\n"
        "sent = wire.generation_to_wire(request).SerializeToString()\n"
        "assert wire.generation_from_wire(generation_pb2.Generation.FromString(sent)) == request\n"
    )
    result = run(sys.executable, "-c", work, path=GENERATOR)
    assert result.returncode == 0, result.stderr
    oldest = str(Requirement(promised).specifier).split(",")[-1].removeprefix(">=")
    assert result.stdout.strip().startswith(f"{oldest}."), f"{result.stdout} is not of {oldest}"


@BUF_IS_THERE
def test_buf_lint_finds_nothing():
    result = run(BUF, "lint", "proto")
    assert (result.stdout + result.stderr, result.returncode) == ("", 0)


@BUF_IS_THERE
def test_buf_would_format_nothing_otherwise():
    result = run(BUF, "format", "--diff", "--exit-code", "proto")
    assert (result.stdout + result.stderr, result.returncode) == ("", 0), "run `make proto`"
