"""The benchmarks of a target that never waits, from end to end: real server processes of the toy runner, few tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import never_waiting, never_waiting_load
from benchmarks.never_waiting_load import Turn, ratios

TOY = ["--backend", "toy", "--prompts-per-workload", "1", "--max-new-tokens", "16", "--runs", "1"]


def turn(mode: str, number: int, tokens: int, seconds: float) -> Turn:
    return Turn(20.0, mode, number, 8, tokens, seconds, 10, True)


def test_a_turn_is_compared_with_that_of_the_way_that_waits_at_the_same_time() -> None:
    turns = [turn("off", 0, 100, 2.0), turn("auto", 0, 100, 1.0), turn("off", 1, 100, 4.0), turn("auto", 1, 100, 5.0)]
    assert ratios(turns, 20.0, "auto") == [2.0, 0.8]
    assert ratios(turns, 0.0, "auto") == []


def test_bad_cores_are_refused_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        never_waiting.main(["--draft-cores", "none"])
    assert "none" in capsys.readouterr().err


@pytest.mark.thorough
def test_every_way_gives_plain_decodings_tokens_and_each_request_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "rows.json"
    assert never_waiting.main([*TOY, "--rtt-ms", "5", "--modes", "never-waiting", "auto", "--output", str(output)]) == 0
    document = json.loads(output.read_text())
    everything = document["rows"][-1]
    assert everything["workload"] == "all" and everything["requests"] == 5 and everything["identical"]
    assert everything["round_trip_s"] >= 0.005 and everything["simulated_s"] > 0
    assert len(document["requests"]) == 5 * 3
    assert "never-waiting" in capsys.readouterr().out


@pytest.mark.thorough
def test_clients_at_the_same_time_get_plain_decodings_tokens_too(tmp_path: Path) -> None:
    output = tmp_path / "turns.json"
    assert never_waiting_load.main([*TOY, "--rtt-ms", "0", "--clients", "3", "--output", str(output)]) == 0
    turns = json.loads(output.read_text())["turns"]
    assert [one["mode"] for one in turns] == ["plain", "off", "never-waiting", "auto"]
    assert all(one["identical"] and one["tokens"] == turns[0]["tokens"] for one in turns)
