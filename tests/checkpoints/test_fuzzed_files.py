"""Whatever is wrong with a file of a model, it is one CheckpointError, and takes little memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoints.fuzzed import MOST_BYTES
from tests.support import REPOSITORY


@pytest.mark.parametrize(
    ("count", "seed"), [(1000, 21), pytest.param(10_000, 16, marks=pytest.mark.thorough)], ids=["1,000", "10,000"]
)
def test_mutated_files_are_read_or_refused_in_one_line_and_within_200_mb(count: int, seed: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.checkpoints.fuzzed", str(tmp_path), str(count), str(seed)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=REPOSITORY)
    assert ran.returncode == 0, ran.stderr[-2000:]
    found = json.loads(ran.stdout)
    assert found["wrong"] == []
    assert found["grown_bytes"] < MOST_BYTES
    for kind, outcomes in found["outcomes"].items():
        assert outcomes["refused"] > count / 50 and outcomes["read"] > 0, f"{kind}: mutations say little: {outcomes}"
