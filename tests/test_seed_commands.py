"""The commands of the project that Tandem grew from, as they stand in its README, run.

Model folders, the host and the port are put in; nothing else is changed, and nothing added.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.launch import free_port
from tests.runners.tiny import model_folder
from tests.support import REPOSITORY

README = REPOSITORY.parent / "shared" / "seeds" / "choral-spec-readme.md"
TARGET = (
    "python main.py --role target --model /home/ubuntu/models/llama-3.1-8b/ --port 50051 --sequence_length 128 "
    "--batch 2 --profile --top_p 1.0"
)
DRAFT = (
    "python main.py --role draft --model /home/ubuntu/models/llama-3.2-1b/ --target_host 18.189.128.139 --port 50051 "
    "--prompt_text prompt.txt --sequence_length 128 --profile --top_p 1.0 --temperature 0.9"
)
FUSED_TARGET = (
    "python main.py --role fused_target --draft_model /home/ubuntu/models/llama-3.2-1b "
    "--target_model /home/ubuntu/models/llama-3.1-8b --port 50051 --sequence_length 128 --batch 2 --tp_degree 2 "
    "--speculation_length 5"
)
FUSED_CLIENT = (
    "python main.py --role fused_client --target_host 18.189.128.139 --port 50051 --prompt_text prompt.txt "
    "--temperature 0.9 --top_p 1.0 --speculation_length 5 --profile"
)
COMPARISON = "python compare_architectures.py --prompt-file prompt.txt --num-runs 3"
VERIFY_TARGET = (
    "python main.py --role verify_target --model /home/ubuntu/models/llama-3.1-8b --prompt_text prompt.txt "
    "--sequence_length 128 --profile"
)
VERIFY_DRAFT = (
    "python main.py --role verify_draft --model /home/ubuntu/models/llama-3.2-1b --prompt_text prompt.txt "
    "--sequence_length 128 --profile"
)
COMMANDS = [TARGET, DRAFT, FUSED_TARGET, FUSED_CLIENT, COMPARISON, VERIFY_TARGET, VERIFY_DRAFT]
PROMPTS = ("The history of AI", "Trainium is")


@pytest.mark.skipif(not README.exists(), reason="the README of the project before lies beside ours in no other clone")
def test_the_commands_are_those_of_the_readme() -> None:
    lines = README.read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line.startswith("python ") and "grpc_tools" not in line] == COMMANDS


class Place:
    """Where commands run: two models, a prompt file, a free port."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.models = {"llama-3.1-8b": model_folder(folder / "8b", 1), "llama-3.2-1b": model_folder(folder / "1b", 2)}
        self.port = str(free_port())

    def words(self, line: str) -> list[str]:
        """What runs a command here."""
        python, program, *arguments = shlex.split(line)
        assert python == "python"
        known = {"18.189.128.139": "127.0.0.1", "50051": self.port}
        for name, folder in self.models.items():
            known |= {f"/home/ubuntu/models/{name}{end}": f"{folder}{end}" for end in ("", "/")}
        return [sys.executable, str(REPOSITORY / program), *(known.get(word, word) for word in arguments)]

    def cwd(self, name: str) -> Path:
        made = self.folder / name
        made.mkdir()
        (made / "prompt.txt").write_text("\n".join(PROMPTS) + "\n")
        return made

    def run(self, line: str, name: str, seconds: float = 100.0) -> subprocess.CompletedProcess[str]:
        words, cwd = self.words(line), self.cwd(name)
        done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=seconds, check=False)
        assert done.returncode == 0, done.stderr
        return done

    @contextlib.contextmanager
    def server(self, line: str) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
        """Once it says that it is ready; its log is in the folder that it runs in."""
        folder = self.cwd("server")
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(self.words(line), cwd=folder, stdout=log, stderr=log)
        try:
            give_up = time.monotonic() + 100
            while "is ready on" not in (said := (folder / "log").read_text()):
                assert process.poll() is None and time.monotonic() < give_up, said
                time.sleep(0.05)
            yield process, folder
        finally:
            process.kill()
            process.wait()


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def rows_of(folder: Path) -> list[dict[str, str]]:
    (table,) = folder.glob("performance_*.csv")
    with table.open() as file:
        rows = list(csv.DictReader(file))
    written = json.loads(table.with_suffix(".json").read_text())
    assert [str(row["rounds"]) for row in written] == [row["rounds"] for row in rows]
    return rows


def final_outputs(stdout: str) -> str:
    assert all(f"[Prompt {i} output]:" in stdout for i in range(len(PROMPTS)))
    return stdout.partition("=== Final outputs ===")[2]


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_target_and_draft(place: Place) -> None:
    """Sampled, they say what the target says alone; and both sides write what the rounds cost."""
    with place.server(TARGET) as (process, folder):
        drafted = place.run(DRAFT, "draft")
        asked = "--prompt_text prompt.txt --sequence_length 128 --temperature 0.9"
        alone = place.run(f"python main.py --role client --port 50051 {asked}", "alone")
        assert final_outputs(drafted.stdout) == final_outputs(alone.stdout)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, (folder / "log").read_text()
    ours, theirs = rows_of(place.folder / "draft"), rows_of(folder)
    sessions = [row for row in theirs if row["kind"] == "session"]
    assert [row["kind"] for row in theirs].count("generate") == len(PROMPTS) == len(ours) == len(sessions)
    assert {row["finish_reason"] for row in sessions} == {"closed"}
    assert {row["prompt_tokens"] for row in sessions} == {row["prompt_tokens"] for row in ours}
    for name in ("rounds", "drafted", "accepted"):  # rounds that were in flight when the text ended are the server's
        assert sum(int(row[name]) for row in sessions) >= sum(int(row[name]) for row in ours)
    assert all(int(row["rounds"]) > 0 for row in ours)
    assert sum(int(row["drafted"]) + int(row["stale_drafts"]) for row in ours) > 0  # those that came late included
    assert all(float(row["verify_seconds"]) > 0 and float(row["queue_seconds"]) >= 0 for row in sessions)
    assert all(int(row["output_tokens"]) == int(row["accepted"]) + int(row["rounds"]) for row in sessions)


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_fused_target_and_client_and_a_rank_that_dies_ends_the_server(place: Place) -> None:
    with place.server(FUSED_TARGET) as (process, folder):
        done = place.run(FUSED_CLIENT, "client")
        assert final_outputs(done.stdout)
        assert [int(row["drafted"]) > 0 for row in rows_of(place.folder / "client")] == [True, True]
        assert "[rank 1] rank 1 follows" in (folder / "log").read_text()
        (other,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(other), signal.SIGKILL)
        assert process.wait(60) == 1
    log = (folder / "log").read_text()
    assert f"rank 1, process {other}, was killed by signal 9: every step needs it, so this server stops" in log
    assert "Traceback" not in log


@pytest.mark.thorough
@pytest.mark.parametrize("line", [VERIFY_TARGET, VERIFY_DRAFT], ids=["verify_target", "verify_draft"])
def test_one_model_alone(place: Place, line: str) -> None:
    done = place.run(line, "alone")
    assert final_outputs(done.stdout) and "[0] token " in done.stdout
    assert len(rows_of(place.folder / "alone")) == len(PROMPTS)


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_the_comparison(place: Place) -> None:
    place.run(COMPARISON, "comparison", 590)
    (written,) = (place.folder / "comparison").glob("results/*/comparison.json")
    assert json.loads(written.read_text())["config"]["num_runs"] == 3
