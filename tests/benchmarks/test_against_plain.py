"""Which of a comparison's figures are held against the bars, on planted comparisons."""

from __future__ import annotations

import json

import pytest

from benchmarks import against_plain
from benchmarks.against_plain import COMPARISONS, RAW_PROMPTS, Incomplete, measure, measured, plain_ratio_bars


def condition(name, rtt, **speedups):
    of = {
        architecture: {
            "speedup_vs_autoregressive": speedup,
            "workloads": {kind: {"speedup_vs_autoregressive": speedup - less} for kind, less in (("a", 0), ("b", 0.6))},
        }
        for architecture, speedup in speedups.items()
    }
    return {"name": name, "varies": "link" if rtt else "base", "link": {"rtt_ms": rtt}, "architectures": of}


def record(architecture, prompt, tpot, under="here"):
    return {"condition": under, "architecture": architecture, "prompt": prompt, "tpot_s": tpot}


BUILT_IN = {
    "schema_version": 2,
    "conditions": [condition("here", 0, fused=1.9, distributed=0.9, never_waiting=1.1)],
    "records": [
        *(record("autoregressive", prompt, 0.01) for prompt in "xy"),
        record("fused", "x", 0.005),
        record("fused", "y", 0.0125),
        record("fused", "y", 0.5, under="elsewhere"),
    ],
}
RAW = {
    "schema_version": 2,
    "conditions": [
        condition("here", 0, fused=1.7, never_waiting=0.5),
        condition("20 ms", 20, fused=1.2, never_waiting=1.0),
        condition("200 ms", 200, fused=1.2, never_waiting=0.97),
    ],
    "records": [],
}


def test_the_worst_workload_prompt_and_link_are_judged():
    bars = plain_ratio_bars({"built-in": BUILT_IN, "raw": RAW})
    assert [(bar.value, bar.verdict) for bar in bars] == [
        (1.9, "met"),
        (pytest.approx(1.3), "met"),
        (pytest.approx(0.8), "missed"),
        (1.7, "met"),
        (0.9, "missed"),
        (1.1, "met"),
        (0.97, "missed"),
    ]
    assert {bar.verdict for bar in plain_ratio_bars({})} == {"not measured"}


def test_a_comparison_that_is_complete_is_not_measured_again(tmp_path, monkeypatch):
    asked = []

    def compare(argv):
        folder = tmp_path / argv[argv.index("--output-dir") + 1]
        asked.append(folder.name)
        folder.mkdir()
        (folder / "comparison.json").write_text(json.dumps(RAW))
        return 0

    monkeypatch.setattr(against_plain.compare, "main", compare)
    (tmp_path / "built-in").mkdir()
    (tmp_path / "built-in" / "comparison.json").write_text(json.dumps(BUILT_IN))
    assert measure(tmp_path) == {"built-in": BUILT_IN, "raw": RAW}
    assert asked == ["raw"]


def test_a_comparison_that_was_interrupted_is_not_judged(tmp_path, monkeypatch):
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "comparison.json").write_text(json.dumps(RAW | {"partial": "interrupted"}))
    assert measured(tmp_path) == {}
    monkeypatch.setattr(against_plain.compare, "main", lambda argv: 130)
    with pytest.raises(Incomplete, match="ended with 130"):
        measure(tmp_path)


def test_raw_prompts_are_sixteen_that_differ():
    lines = RAW_PROMPTS.read_text(encoding="utf-8").splitlines()
    assert len(set(lines)) == 16 and all(lines)
    assert "--raw" in COMPARISONS["raw"]
