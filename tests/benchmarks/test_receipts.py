"""The benchmark of receipts checks what it generates, and finds what it forges."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.receipts import main


@pytest.mark.thorough
def test_every_receipt_is_right_every_forgery_is_found_and_both_times_are_written(tmp_path: Path) -> None:
    few = ["--prompts", "2", "--rounds", "2", "--max-new-tokens", "70", "--backend", "toy", "--model", "step=0.002"]
    main([*few, "--output", str(tmp_path / "receipts.json")])
    greedy, sampled = json.loads((tmp_path / "receipts.json").read_text())
    for figures in (greedy, sampled):
        assert figures["outputs"] == figures["right"] == figures["forged_found"] == 4
        assert figures["tokens"] == 4 * 70 and 0 < figures["checking_s"] < figures["generating_s"]
