"""When prefill apart from decode pays: from measured times, bytes per token and a link."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tandem.cli.main import main
from tandem.comparison.analysis.advice import run_advice
from tandem.comparison.analysis.prefill_advice import PrefillCosts, prefill_costs, prefill_lines
from tandem.comparison.links.settings import LinkSettings

COSTS = PrefillCosts(
    prompt_tokens=400,
    chunk_tokens=64,
    in_place_s=0.4,
    in_place_beside_s=0.6,
    apart_s=0.42,
    apart_beside_s=0.45,
    gap_s=0.02,
    gap_in_place_s=0.09,
    gap_apart_s=0.025,
    bytes_per_token=50_000,
)


def first(costs: PrefillCosts, rtt_ms: float = 0.0, mbps: float | None = None) -> str:
    return next(prefill_lines(costs, LinkSettings(rtt_ms, mbps)))


def test_pages_travel_while_others_are_computed_and_the_longer_of_the_two_counts() -> None:
    assert LinkSettings(0.0, 400.0).transfer(COSTS.prompt_bytes) == pytest.approx(0.4)
    assert COSTS.apart_on(LinkSettings(0.0, None)) == pytest.approx(0.45)
    assert COSTS.apart_on(LinkSettings(0.0, 1000.0)) == pytest.approx(0.45)
    assert COSTS.apart_on(LinkSettings(20.0, 200.0)) == pytest.approx(0.8 + 0.05 + 0.02)
    assert COSTS.keeps_up_mbps == pytest.approx(400.0)


def test_the_least_bandwidth_is_where_it_begins_to_pay() -> None:
    link = LinkSettings(10.0, None)
    least = COSTS.least_mbps(link)
    assert least is not None and 300 < least < 400
    assert "in time to first token and" in first(COSTS, 10.0, least * 1.01)
    assert "not in time to first token" in first(COSTS, 10.0, least * 0.99)
    assert COSTS.least_mbps(LinkSettings(200.0, None)) is None


def test_what_pays_is_said_for_the_first_token_and_for_the_gaps_of_others() -> None:
    assert "prefill apart pays, in time to first token and in the gaps of others" in first(COSTS)
    assert "pays in the gaps of others, not in time" in first(COSTS, 500.0)
    still = replace(COSTS, gap_apart_s=0.09)
    assert "in time to first token alone" in first(still)
    assert "prefill in place; apart does not pay" in first(still, 500.0)


def test_the_advisor_reads_a_file_of_the_benchmark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "prefill_apart.json"
    report.write_text(json.dumps({"prefill_costs": asdict(COSTS), "measured": {}}))
    assert main(["--role", "advise", "--report", str(report), "--rtt_ms", "1", "--link_mbps", "200"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("At 1 ms round trip and 200 Mbit/s: prefill apart pays in the gaps of others, not in time")
    assert "20.0 MB, 800.0 ms on the link, 400.0 ms to compute" in said
    assert "at most 2.5 such prompts per second" in said


def test_a_file_without_usable_costs_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "prefill_apart.json"
    for costs, said in (
        ({}, "report: it has no prefill_costs"),
        ({**asdict(COSTS), "gap_s": 0}, "report: prefill_costs.gap_s is 0, not a number above 0"),
        ({**asdict(COSTS), "gap_s": "x"}, "report: prefill_costs.gap_s is 'x'"),
    ):
        report.write_text(json.dumps({"prefill_costs": costs}))
        assert main(["--role", "advise", "--report", str(report)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert said in line
    with pytest.raises(ValueError, match="it has no prefill_costs"):
        prefill_costs({})


def test_a_bandwidth_is_above_zero_and_no_part_of_a_comparison(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match="link_mbps: 0 is not a number above 0"):
        run_advice(tmp_path, link_mbps=0.0)
    (tmp_path / "comparison.json").write_text("{}")
    assert main(["--role", "advise", "--report", str(tmp_path / "comparison.json"), "--link_mbps", "5"]) == 2
    assert "link_mbps: is for a report of benchmarks/prefill_apart.py" in capsys.readouterr().err
