"""The programs in examples/, as a user runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import GREEDY, HANG, REPOSITORY, oracle, server_process


def run_example(name: str, folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "examples" / name), *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    with server_process(tmp_path, "--role", "target") as server:
        yield server.wait_ready()


def test_generate(address: str, tmp_path: Path) -> None:
    shown = run_example("generate.py", tmp_path, address)
    assert shown.startswith("toy\n") and "0 of 0 draft tokens were accepted" in shown


def test_own_drafter(address: str, tmp_path: Path) -> None:
    tokens, rounds = run_example("own_drafter.py", tmp_path, address).splitlines()
    said = oracle([7, 8, 9, 7, 8, 9, 7, 8], GREEDY, 40)
    assert tokens == " ".join(map(str, said)) and rounds.endswith(f"rounds for {len(said)} tokens")


@pytest.mark.thorough
def test_compare_two(tmp_path: Path) -> None:
    pytest.importorskip("tandem.comparison.api")
    shown = run_example("compare_two.py", tmp_path, "toy")
    assert "autoregressive" in shown and "fused" in shown
