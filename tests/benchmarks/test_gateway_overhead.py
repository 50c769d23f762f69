"""What a way adds is taken between requests of the same prompt and turn; and the whole runs on the toy model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.gateway_overhead import DIRECT, GATEWAY, WAYS, TimedAnswer, added, main


def test_differences_are_those_of_the_same_prompt_and_turn() -> None:
    found = [
        TimedAnswer(DIRECT, 0, 1, ttft=0.010, tpot=0.001, tokens=8),
        TimedAnswer(DIRECT, 1, 1, ttft=0.100, tpot=0.002, tokens=8),
        TimedAnswer(GATEWAY, 1, 1, ttft=0.103, tpot=0.002, tokens=8),
        TimedAnswer(GATEWAY, 0, 1, ttft=0.011, tpot=0.0012, tokens=8),
    ]
    assert added(found, GATEWAY, "ttft") == pytest.approx([1.0, 3.0])
    assert added(found, GATEWAY, "tpot") == pytest.approx([0.2, 0.0])


@pytest.mark.thorough
def test_the_benchmark_measures_all_ways_with_real_processes(tmp_path: Path) -> None:
    few = ("--prompts", "2", "--repeats", "1", "--max-new-tokens", "6", "--server-flags", "--backend toy")
    assert main([*few, "--output", str(tmp_path / "out.json")]) == 0
    samples = json.loads((tmp_path / "out.json").read_text())["samples"]
    assert sorted((each["way"], each["prompt"]) for each in samples) == sorted(
        (way, prompt) for way in WAYS for prompt in (0, 1)
    )
    assert all(each["tokens"] == 6 and each["ttft"] > 0 for each in samples)
