"""Compiled models in a store without rename, lock and append: a compile job, a server that reads it, its restart."""

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
from tandem.runners.loading import Execution
from tandem_nxdi import artifacts
from tandem_nxdi.artifacts import CompiledFolder, ensure
from tandem_nxdi.load import compile_nxdi
from tandem_nxdi.store import NAME, fetch, publish
from tests.runners.nxdi import simulated
from tests.runners.nxdi.runners import SHAPE, Bench, bench  # noqa: F401
from tests.runners.nxdi.simulated import model_folder
from tests.support import GREEDY, REPOSITORY, oracle

MADE_FROM = {"target": {"weights": "w"}, "neuron_config": {"tp_degree": 2}, "sdk": {"neuronx-cc": "2"}}
PROGRAM = [sys.executable, "-m", "tests.runners.nxdi.s3like"]


@pytest.fixture
def compiled(tmp_path: Path) -> Path:
    folder = tmp_path / "model-0123"
    (folder / "weights").mkdir(parents=True)
    (folder / "model.pt").write_bytes(b"graphs" * 1000)
    (folder / "weights" / "tp0.safetensors").write_bytes(b"")
    return folder


def test_a_set_comes_back_as_it_was_and_is_published_once(compiled: Path, tmp_path: Path) -> None:
    kept = publish(compiled, MADE_FROM, tmp_path / "store")
    assert kept == tmp_path / "store" / "model-0123"
    assert publish(compiled, MADE_FROM, tmp_path / "store") is None
    back = tmp_path / "back" / "model-0123.partial-7"
    back.mkdir(parents=True)
    assert fetch(tmp_path / "store", MADE_FROM, back)
    names = sorted(path.relative_to(compiled) for path in compiled.rglob("*") if path.is_file())
    assert sorted(path.relative_to(back) for path in back.rglob("*") if path.is_file()) == names
    assert all((back / name).read_bytes() == (compiled / name).read_bytes() for name in names)


@pytest.mark.parametrize("damage", ["no manifest", "half a manifest", "a byte", "a file", "other sources", "outside"])
def test_a_set_that_is_not_whole_is_not_used(
    compiled: Path, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    kept = publish(compiled, MADE_FROM, tmp_path / "store")
    assert kept
    manifest, asked = kept / NAME, MADE_FROM
    text = manifest.read_text()
    if damage == "no manifest":
        manifest.unlink()
    elif damage == "half a manifest":
        manifest.write_text(text[: len(text) // 2])
    elif damage == "a byte":
        (kept / "model.pt").write_bytes(b"graphs" * 999 + b"graphz")
    elif damage == "a file":
        (kept / "weights" / "tp0.safetensors").unlink()
    elif damage == "other sources":
        asked = {**MADE_FROM, "sdk": {"neuronx-cc": "3"}}
    else:
        manifest.write_text(text.replace("weights/tp0", "../../tp0"))
    into = tmp_path / "model-0123"
    assert not fetch(tmp_path / "store", asked, into)
    assert any(word in caplog.text for word in ("has no compiled set", "is damaged", "outside its folder"))


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
    settings = bench.settings({"artifacts": str(tmp_path / "not mounted" / "compiled")})
    with pytest.raises(ValueError, match=r"artifacts: .*/not mounted/compiled: Not a directory; is the bucket mounted"):
        compile_nxdi(find(str(bench.model())), Execution(), SHAPE, settings, True)
    assert not simulated.COMPILED
    settings = bench.settings({"artifacts": str(tmp_path / "mounted" / "compiled")})
    assert "published to" in compile_nxdi(find(str(bench.model())), Execution(), SHAPE, settings, True)


def test_a_node_takes_a_set_from_the_store_and_compiles_where_that_is_damaged(tmp_path: Path) -> None:
    def job(node: str) -> CompiledFolder:
        return artifacts.compiled(str(tmp_path / node), "model", MADE_FROM, str(tmp_path / "store"))

    def compile_into(folder: Path) -> None:
        made.append(folder)
        (folder / "model.pt").write_text("compiled here")
        (folder / "neuron_config.json").write_text("{}")

    made: list[Path] = []
    assert ensure(job("first"), compile_into) and job("first").ready
    kept = publish(job("first").folder, MADE_FROM, tmp_path / "store")
    assert kept and not ensure(job("second"), compile_into) and job("second").ready
    (kept / "model.pt").write_text("rot")
    assert not ensure(job("second"), compile_into), "what it has it keeps"
    assert ensure(job("third"), compile_into) and len(made) == 2


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
    assert all((one / NAME).is_file() for one in sets)
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


def test_the_bucket_of_these_tests_refuses_what_s3_refuses(tmp_path: Path) -> None:
    code = (
        "import fcntl, os, sys\n"
        "from pathlib import Path\n"
        "from tests.runners.nxdi.s3like import Refused, forbid\n"
        "root = Path(sys.argv[1]); file = root / 'a'; file.write_text('a'); forbid(root)\n"
        "def refused(act):\n"
        "    try: act()\n"
        "    except Refused: return True\n"
        "    return False\n"
        "acts = [lambda: file.rename(root / 'b'), lambda: open(file, 'a'), lambda: open(file, 'r+'),\n"
        "        lambda: fcntl.flock(open(file), fcntl.LOCK_EX), lambda: os.link(file, root / 'c'),\n"
        "        lambda: file.chmod(0o600), lambda: os.utime(file), lambda: os.truncate(file, 0)]\n"
        "assert [refused(act) for act in acts] == [True] * len(acts)\n"
        "file.write_text('b'); assert file.read_text() == 'b'; (root / 'd').mkdir(); file.unlink()\n"
    )
    done = run([sys.executable, "-c", code, str(tmp_path)])
    assert done.returncode == 0, done.stderr
