"""Two runs beside each other."""

from __future__ import annotations

import copy
from typing import Any

from tandem.comparison.analysis.regression import compare_with_baseline, regression_lines
from tandem.comparison.measuring.records import Record, record_as_json
from tests.comparison.test_predictions import request


def comparison() -> dict[str, Any]:
    records = [
        Record(name, f"code/{i}", "code", 0, request(name, length, 20 + i))
        for name, length in (("autoregressive", 0), ("fused", 3))
        for i in range(5)
    ]
    return {
        "baseline": {"architecture": "autoregressive", "plain_width": 1},
        "settings": {"speculation_length": 3},
        "machine": {"cores": 2},
        "records": [record_as_json(record) for record in records],
    }


def slower(of: dict[str, Any], architecture: str, factor: float) -> dict[str, Any]:
    changed = copy.deepcopy(of)
    for record in changed["records"]:
        if record["architecture"] == architecture:
            record["tpot_s"] *= factor
    return changed


def test_the_same_run_twice_has_no_regression_and_no_change() -> None:
    found = compare_with_baseline(comparison(), comparison())
    assert not found.regressions and not found.other_tokens and not found.remarks
    assert all(not change.beyond_noise for change in found.changes)
    assert list(regression_lines(found))[-1] == "no regression beyond noise"


def test_a_slower_architecture_is_a_regression_of_its_speedup() -> None:
    found = compare_with_baseline(comparison(), slower(comparison(), "fused", 1.2))
    assert [(c.architecture, c.figure) for c in found.regressions] == [("fused", "speedup")]
    assert any("REGRESSION" in line and "-16.7 %" in line for line in regression_lines(found))


def test_under_load_nothing_is_a_regression() -> None:
    before = comparison()
    for record in before["records"]:
        record["sent_s"] = 0.5
    found = compare_with_baseline(before, slower(before, "fused", 1.2))
    assert not found.regressions
    assert any(change.beyond_noise for change in found.changes)


def test_a_faster_one_is_a_change_beyond_noise_and_no_regression() -> None:
    found = compare_with_baseline(comparison(), slower(comparison(), "fused", 0.8))
    assert not found.regressions
    assert any(c.figure == "speedup" and c.beyond_noise for c in found.changes)


def test_a_slower_machine_is_only_plain_decodings_regression() -> None:
    found = compare_with_baseline(comparison(), slower(slower(comparison(), "fused", 1.3), "autoregressive", 1.3))
    assert [(c.architecture, c.figure) for c in found.regressions] == [("autoregressive", "tpot")]


def test_fewer_accepted_tokens_are_a_regression() -> None:
    worse = comparison()
    for record in worse["records"]:
        record["accepted"] //= 2
    assert [c.figure for c in compare_with_baseline(comparison(), worse).regressions] == ["acceptance rate"]


def test_noise_is_not_called_a_regression() -> None:
    noisy = comparison()
    for i, record in enumerate(noisy["records"]):
        record["tpot_s"] *= 1.06 if i % 2 else 0.96
    assert not compare_with_baseline(comparison(), noisy).regressions


def test_other_tokens_settings_and_machines_are_named() -> None:
    other = comparison()
    other["records"][-1]["output_token_ids"] = [9]
    other["settings"]["speculation_length"] = 5
    other["machine"]["cores"] = 64
    found = compare_with_baseline(comparison(), other)
    assert found.other_tokens == ("base, fused, code/4",)
    assert "speculation_length: 3 then, 5 now" in found.remarks
    assert any("machines differ" in remark for remark in found.remarks)
    assert any("1 requests produced other tokens" in line for line in regression_lines(found))


def test_what_only_one_run_has_is_named() -> None:
    less = comparison()
    less["records"] = [r for r in less["records"] if r["architecture"] != "fused"]
    assert "base, fused: not in both" in compare_with_baseline(less, comparison()).remarks


def test_two_prompts_are_too_few_to_judge() -> None:
    few, worse = comparison(), slower(comparison(), "fused", 2.0)
    for of in (few, worse):
        of["records"] = [r for r in of["records"] if r["prompt"] in ("code/0", "code/1")]
    found = compare_with_baseline(few, worse)
    assert not found.regressions
    assert any("too few prompts for an interval" in line for line in regression_lines(found))
