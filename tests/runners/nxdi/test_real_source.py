"""The backend against NxD Inference's own Python code, where it is at hand: see real_source.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import REPOSITORY
from tests.training.eagle1_pair import make_pair

NAME = "TANDEM_NXDI_SOURCE"
SAME = (
    "plain, to the last position",
    "plain, sampled",
    "drafted, greedy",
    "drafted, sampled",
    "fused",
    "sampled, apart from the fused graph",
    "fused, its models loaded apart after it",
    "plain after fused",
    "fused, families differ",
    "of transformers 5",
    "one line",
    "fused, one line",
    "with a mask of sequence ids",
    "eagle",
    "eagle, trained here",
    "buckets",
    "tokens only",
    "sampled on the host",
)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    source = os.environ.get(NAME)
    if not source:
        pytest.skip(f"{NAME} is not set: NxDI's and NxD's src folders and transformers 4.57, joined by {os.pathsep!r}")
    folder = tmp_path_factory.mktemp("nxdi")
    make_pair(folder / "trained")
    program = Path(__file__).with_name("real_source.py")
    command = [sys.executable, str(program), str(folder)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.timeout(660)
@pytest.mark.parametrize("name", SAME)
def test_what_transformers_says_alone_comes_out_of_nxdi(report: dict[str, Any], name: str) -> None:
    assert report[name].get("same") == [True] * 4, report[name]
    if name in ("drafted, greedy", "fused"):
        assert 0 < report[name]["accepted"] < report[name]["drafted"]
    if name == "eagle, trained here":
        assert report[name]["accepted"] > 0.2 * report[name]["drafted"], "no better than an untrained head"


@pytest.mark.slow
@pytest.mark.timeout(660)
def test_our_lists_of_fields_are_nxdis(report: dict[str, Any]) -> None:
    assert report["fields"] == {name: [] for name in report["fields"]}
