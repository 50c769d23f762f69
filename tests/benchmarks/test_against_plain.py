"""Which of a comparison's figures are held against the bars, on records whose times were made."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import against_plain
from benchmarks.against_plain import COMPARISONS, RAW_PROMPTS, Incomplete, measure, measured, plain_ratio_bars
from tandem.comparison.analysis.comparison import Comparison, comparison_as_text
from tests.comparison.test_verdict import comparison, run

PLAIN = {"autoregressive": 0.019}
BUILT_IN = comparison(run({**PLAIN, "fused": 0.01, "distributed": 0.02, "never_waiting": 0.0175}, jitter=0.0))
RAW = comparison(
    [
        *run({**PLAIN, "fused": 0.01, "never_waiting": 0.03}, jitter=0.0),
        *run({**PLAIN, "fused": 0.01, "never_waiting": 0.019}, jitter=0.0, condition="RTT 20 ms"),
        *run({**PLAIN, "fused": 0.01, "never_waiting": 0.02}, jitter=0.0, condition="RTT 200 ms"),
    ],
    rtts=(0.0, 20.0, 200.0),
)


def test_the_worst_workload_prompt_and_link_are_judged() -> None:
    bars = plain_ratio_bars({"built-in": BUILT_IN, "raw": RAW})
    verdicts = ["met", "met", "met", "met", "missed", "met", "missed"]
    assert [bar.value for bar in bars] == pytest.approx([1.9, 1.9, 1.9, 1.9, 0.95, 1.0857, 0.95], abs=1e-3)
    assert [bar.verdict for bar in bars] == verdicts
    assert {bar.verdict for bar in plain_ratio_bars({})} == {"not measured"}


def written(folder: Path, found: Comparison) -> None:
    folder.mkdir()
    (folder / "comparison.json").write_text(comparison_as_text(found))


def test_a_comparison_that_is_complete_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    def compare(argv: list[str]) -> int:
        folder = tmp_path / argv[argv.index("--output-dir") + 1]
        ran.append(folder.name)
        written(folder, RAW)
        return 0

    monkeypatch.setattr(against_plain.compare, "main", compare)
    written(tmp_path / "built-in", BUILT_IN)
    assert measure(tmp_path) == {"built-in": BUILT_IN, "raw": RAW}
    assert ran == ["raw"]


def test_a_comparison_that_was_interrupted_is_not_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "raw").mkdir()
    text = comparison_as_text(RAW).replace('"missing": null', '"missing": "interrupted"')
    (tmp_path / "raw" / "comparison.json").write_text(text)
    assert measured(tmp_path) == {}
    monkeypatch.setattr(against_plain.compare, "main", lambda argv: 130)
    with pytest.raises(Incomplete, match="ended with 130"):
        measure(tmp_path)


def test_raw_prompts_are_sixteen_that_differ() -> None:
    lines = RAW_PROMPTS.read_text(encoding="utf-8").splitlines()
    assert len(set(lines)) == 16 and all(lines)
    assert "--raw" in COMPARISONS["raw"]
