"""Compiled models: found again by what they were made from, and copied through a store as S3 is."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.checkpoints.locate import find
from tandem.checkpoints.trusted_cache import NOTE
from tandem.runners.backends import LoadRequest
from tandem.runners.load_runner import Execution, Shape
from tandem_nxdi import backend
from tandem_nxdi.backend import BACKEND
from tandem_nxdi.compiled import MANIFEST, CompiledModel, compiled_model
from tests.runners.nxdi import simulated
from tests.runners.nxdi.runners import SHAPE, Bench, bench  # noqa: F401
from tests.runners.nxdi.simulated import model_folder
from tests.support import GREEDY, REPOSITORY, oracle

MADE_FROM = {"target": {"weights": "w"}, "neuron_config": {"tp_degree": 2}, "sdk": {"neuronx-cc": "2"}}
PROGRAM = [sys.executable, "-m", "tests.runners.nxdi.s3like"]


def folders(bench: Bench) -> list[Path]:  # noqa: F811
    return sorted(path for path in (bench.folder / "compiled").iterdir() if path.is_dir())


def test_the_same_configuration_compiles_once(bench: Bench) -> None:  # noqa: F811
    bench.target()
    bench.target()
    assert len(simulated.COMPILED) == 1 and len(simulated.LOADED) == 2
    (folder,) = folders(bench)
    noted = json.loads((folder / MANIFEST).read_text())
    assert noted["target"]["name"] == "model0" and noted["neuron_config"]["speculation_length"] == 5
    assert set(noted["sdk"]) >= {"neuronx-distributed-inference", "neuronx-cc", "torch"}
    assert "window" in noted["what"]


def test_other_fields_weights_versions_or_roles_compile_anew(bench: Bench, monkeypatch) -> None:  # noqa: F811
    bench.target()
    bench.target(neuron_config={"fused_qkv": True})
    bench.target(Shape(2, 64, 4))
    bench.draft(0.0)
    bench.pair(0.0)
    (bench.model() / "model.safetensors").write_text("other weights")
    bench.target()
    monkeypatch.setattr(backend, "versions", lambda: {"neuronx-cc": "another"})
    bench.target()
    assert len(simulated.COMPILED) == len(folders(bench)) == 7


def compile_into(folder: Path) -> None:
    (folder / "weights").mkdir()
    (folder / "model.pt").write_bytes(b"graphs" * 1000)
    (folder / "weights" / "tp0.safetensors").write_bytes(b"")


def no_compiler(folder: Path) -> None:
    (folder / "model.pt").write_text("half")
    raise RuntimeError("compiler exit 70")


def test_an_interrupted_compilation_is_not_mistaken_for_a_model(tmp_path: Path) -> None:
    wanted = compiled_model(str(tmp_path), "m", {"a": 1})
    with pytest.raises(RuntimeError, match="exit 70"):
        wanted.ensure(no_compiler)
    assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == []
    folder, compiled = wanted.ensure(compile_into)
    assert compiled and wanted.ensure(no_compiler) == (folder, False)
    (folder / MANIFEST).write_text("{}")
    assert wanted.ensure(compile_into) == (folder, True)


def test_two_compilations_never_share_a_scratch_folder(bench: Bench, monkeypatch) -> None:  # noqa: F811
    seen = []
    monkeypatch.delenv("BASE_COMPILE_WORK_DIR", raising=False)
    compile_ = simulated.Application.compile

    def noting(self: simulated.Application, path: str) -> None:
        seen.append(os.environ["BASE_COMPILE_WORK_DIR"])
        compile_(self, path)

    monkeypatch.setattr(simulated.Application, "compile", noting)
    bench.target()
    assert str(os.getpid()) in seen[0] and "BASE_COMPILE_WORK_DIR" not in os.environ
    monkeypatch.setenv("BASE_COMPILE_WORK_DIR", "/elsewhere/")
    bench.draft()
    assert seen[1] == "/elsewhere/"


@pytest.mark.parametrize("damage", ["", "no hashes", "half", "a byte", "a file", "other sources", "outside"])
def test_a_node_takes_a_whole_set_from_the_store_and_compiles_otherwise(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    def job(node: str) -> CompiledModel:
        return compiled_model(str(tmp_path / node), "model", MADE_FROM, str(tmp_path / "store"))

    wanted, store = job("first"), tmp_path / "store"
    folder, compiled = wanted.ensure(compile_into)
    assert compiled and wanted.publish(folder, store) and not wanted.publish(folder, store)
    kept, second = store / wanted.name, job("second")
    text = (kept / NOTE).read_text()
    if damage == "no hashes":
        (kept / NOTE).unlink()
    elif damage == "half":
        (kept / NOTE).write_text(text[: len(text) // 2])
    elif damage == "a byte":
        (kept / "model.pt").write_bytes(b"graphs" * 999 + b"graphz")
    elif damage == "a file":
        (kept / "weights" / "tp0.safetensors").unlink()
    elif damage == "other sources":
        second = compiled_model(str(tmp_path / "second"), "model", {**MADE_FROM, "sdk": "3"}, str(store))
    elif damage == "outside":
        (kept / NOTE).write_text(text.replace("weights/tp0", "../../tp0"))
    back, compiled = second.ensure(compile_into)
    assert compiled is bool(damage)
    files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    assert sorted(path.relative_to(back) for path in back.rglob("*") if path.is_file()) == files
    said = ("has no compiled set", "is damaged", "outside its folder") if damage else ("fetched ",)
    assert not damage or any(word in caplog.text for word in said)
    (kept / "model.pt").write_text("rot")
    assert second.ensure(no_compiler) == (back, False), "what it has it keeps"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    model_folder(tmp_path, "target")
    model_folder(tmp_path, "draft", miss=0.3)
    (tmp_path / "bucket").mkdir()
    return tmp_path


def command(place: Path, role: str, cache: str, *more: str) -> list[str]:
    models = ["--target_model", str(place / "target"), "--draft_model", str(place / "draft"), "--backend", "nxdi"]
    shape = ["--batch", "2", "--sequence_length", "64", "--speculation_length", "4"]
    kept = ["--artifacts", str(place / "bucket" / "compiled"), "--compiled_dir", str(place / cache)]
    return [*PROGRAM, str(place / "bucket"), "--role", role, *models, *shape, *kept, *more]


def run(words: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, timeout=100, check=False)


@contextlib.contextmanager
def server(place: Path, cache: str, name: str) -> Iterator[tuple[str, Path]]:
    """Yields the address of a fused server, and its log."""
    ready, log = place / f"{name}.ready", place / f"{name}.log"
    words = command(place, "fused_target", cache, "--port", "0", "--ready_file", str(ready))
    with log.open("wb") as output:
        process = subprocess.Popen(words, cwd=REPOSITORY, stdout=output, stderr=output)
    try:
        give_up = time.monotonic() + 60
        while not ready.exists():
            assert process.poll() is None and time.monotonic() < give_up, log.read_text()
            time.sleep(0.05)
        said = json.loads(ready.read_text())
        yield f"{said['host']}:{said['port']}", log
    finally:
        process.terminate()
        process.wait(30)


def asked(address: str, *more: str) -> str:
    words = ["--role", "fused_client", "--target_host", address, "--prompt", "abab", "--max_new_tokens", "12"]
    done = run([sys.executable, "-m", "tandem", *words, "--ignore_eos", *more])
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_store_that_cannot_be_written_is_refused_before_anything_compiles(bench: Bench, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "not mounted").write_text("")

    def compiled(store: Path) -> str:
        request = LoadRequest(Execution(), SHAPE, bench.settings({"artifacts": str(store)}))
        return next(BACKEND.compile(find(str(bench.model())), None, request, "target"))

    with pytest.raises(ValueError, match=r"artifacts: .*/not mounted/compiled: Not a directory; is the bucket mounted"):
        compiled(tmp_path / "not mounted" / "compiled")
    assert not simulated.COMPILED
    assert "published to" in compiled(tmp_path / "mounted" / "compiled")


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_a_job_compiles_into_a_bucket_and_servers_start_from_it(place: Path) -> None:
    job = run(command(place, "compile", "job", "--compile_for", "fused"))
    assert job.returncode == 0, job.stderr
    lines = job.stdout.splitlines()
    assert [line.split(":")[0] for line in lines[:3]] == ["fused"] * 3 and lines[3].startswith("ready after")
    assert all("compiled, published to" in line for line in lines[:3]), job.stdout
    sets = sorted((place / "bucket" / "compiled").iterdir())
    kinds = sorted(one.name.split("-")[1] for one in sets)
    assert kinds == ["fused", "plain", "window"], "the graph, and its models apart"
    assert all((one / NOTE).is_file() for one in sets)
    again = run(command(place, "compile", "job", "--compile_for", "fused"))
    assert again.stdout.count("there already, in") == 3
    with server(place, "node", "first") as (address, log):
        outputs = [asked(address), asked(address, "--temperature", "0.9")]
        assert log.read_text().count("fetched ") == 3 and "compiled into" not in log.read_text()
    for file in (place / "bucket").rglob("*"):
        os.chmod(file, 0o555 if file.is_dir() else 0o444)
    with server(place, "node", "restarted") as (address, log):
        assert [asked(address), asked(address, "--temperature", "0.9")] == outputs
        assert "fetched " not in log.read_text() and "compiled into" not in log.read_text()
    (damaged,) = (place / "bucket" / "compiled").glob("*fused*/model.pt")
    os.chmod(damaged, 0o644)
    damaged.write_text("rot")
    with server(place, "other-node", "damaged") as (address, log):
        assert asked(address) == outputs[0]
        assert "a compiled set is damaged" in log.read_text() and log.read_text().count("compiled into") == 1
    assert "".join(map(chr, oracle(b"abab", GREEDY, 4, past_the_end=True))) in outputs[0]
