"""The hints of a light install, as written, lead to a server: without an index, torch or a compiler."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tandem.runners.native.compilation import LEVELS, cpu_features
from tests.openai.door import CHAT, COMPLETIONS, LOG, READY, Door, wait_ready
from tests.packaging.environments import build_wheels, environment, output, pip, repack, run
from tests.support import HANG
from tests.test_setup import PROJECT, served_requirements

LEVEL = next((level for level in LEVELS if level.needs <= set(cpu_features().split())), None)
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(LEVEL is None, reason="no library is compiled ahead for this CPU"),
]
pytest.importorskip("setuptools", reason="builds wheels without a network: pip install setuptools")

MEGABYTE = 1_000_000
CLIENT_WHEEL, INDEX_FILE = 2 * MEGABYTE, 100 * MEGABYTE  # the light client's, and the most that PyPI takes
LIBRARIES, PAIR = 185 * MEGABYTE, 137 * MEGABYTE  # of the serving environment
PROMPT = "one, two, three, four, five,"
ASK = f"""
import sys, models, services, clients
from tandem import Client
assert models.MINE and services.MINE and clients.MINE
with Client(sys.argv[1]) as client:
    print(client.generate({PROMPT!r}, max_new_tokens=8).text)
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert LEVEL is not None
    folder = tmp_path_factory.mktemp("the wheels")
    build_wheels(folder, "tandem", "native", "draft", "head", "smollm2", levels=LEVEL.name)
    needs = [*PROJECT["dependencies"], *served_requirements(), *PROJECT["optional-dependencies"]["comparison"]]
    repack(folder, (Requirement(line).name for line in needs))
    return folder


@pytest.fixture
def user(tmp_path: Path) -> Path:
    """A folder with packages of the user's own, named like ours."""
    for package in ("models", "services", "clients"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("MINE = 'written by the user'\n")
    return tmp_path


def bytes_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file() and not file.is_symlink())


@contextlib.contextmanager
def serving(python: Path, user: Path, **variables: str) -> Iterator[Door]:
    """`tandem serve` in the user's folder, once it is ready."""
    command = [python.parent / "tandem", "serve", "--http_port", "0", "--ready_file", user / READY]
    (user / READY).unlink(missing_ok=True)
    with (user / LOG).open("w") as log:
        process = subprocess.Popen(command, cwd=user, env=variables, stdout=log, stderr=log, text=True)
    try:
        yield wait_ready(process, user)
    finally:
        process.terminate()
        process.wait(timeout=HANG)


def install_as_hinted(python: Path, user: Path, *command: str) -> None:
    """Runs the install command in a refusal's line, as it is written."""
    refused = run(python, user, "tandem", *command)
    line = refused.stderr.splitlines()[-1]
    assert refused.returncode == 2 and line.startswith("tandem"), refused.stderr
    pip(python, *shlex.split(line[line.index("pip install") :])[1:])


def test_the_hints_of_a_light_install_lead_to_a_server_with_the_embedded_pair(
    wheels: Path, user: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {wheel.name.split("-")[0]: wheel for wheel in wheels.glob("tandem*.whl")}
    sizes = [file.stat().st_size for file in files.values()]
    assert files["tandem_speculative"].stat().st_size < CLIENT_WHEEL and max(sizes) < INDEX_FILE
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    python = environment(user / "venv")
    pip(python, "install", "--quiet", "--find-links", wheels, files["tandem_speculative"])
    install_as_hinted(python, user, "serve")
    (packages,) = (user / "venv").glob("lib/python*/site-packages")
    assert not {"torch", "transformers"} & {folder.name for folder in packages.iterdir()}
    pair = bytes_of(packages / "tandem_weights")
    assert pair < PAIR and bytes_of(user / "venv") - pair < LIBRARIES

    bare = {"PATH": "/nowhere", "HOME": str(user), "TANDEM_CACHE": str(user / "cache")}  # where no compiler is
    with serving(python, user, **bare) as gate:
        ready = json.loads((user / READY).read_text())
        said = output(python, user, "-c", f"import sys; sys.path.insert(0, ''){ASK}", f"127.0.0.1:{ready['port']}")
        answer = gate.post(COMPLETIONS, prompt=PROMPT, max_tokens=8, temperature=0)
        assert answer["choices"][0]["text"].strip() == said != ""
        schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}}, "required": ["name"]}
        shape = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        structured = gate.post(CHAT, max_tokens=40, temperature=0, response_format=shape)
        assert json.loads(structured["choices"][0]["message"]["content"]).keys() == {"name"}
    log = (user / LOG).read_text()
    assert "certifying" in log and "compiling the native steps" not in log and "several times slower" not in log
    with serving(python, user, **bare):
        warm = (user / LOG).read_text()
    assert warm.count("passed their check here") == 1 and "certifying" not in warm
    assert "draft: lookup and the shipped EAGLE head" in warm

    install_as_hinted(python, user, "compare", "--prompt", "x")
    small = ("--architectures", "autoregressive,fused", "--prompt", PROMPT, "--max-new-tokens", "8")
    done = run(python, user, "tandem", "compare", *small, "--output-dir", "report", TANDEM_CACHE=bare["TANDEM_CACHE"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert (user / "report" / "report.html").is_file() and "torch" not in os.listdir(packages)
