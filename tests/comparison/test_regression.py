"""Two runs beside each other."""

from __future__ import annotations

import copy
from typing import Any

from tandem.comparison.analysis.regression import Change, changes_between, differences, regression_lines
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


def regressions(changes: list[Change]) -> list[Change]:
    return [change for change in changes if change.regression]


def test_the_same_run_twice_has_no_regression_and_no_change() -> None:
    found = changes_between(comparison(), comparison())
    assert not list(differences(comparison(), comparison()))
    assert all(not change.beyond_noise and not change.regression for change in found)
    assert list(regression_lines(found, ()))[-1] == "no regression beyond noise"


def test_a_slower_architecture_is_a_regression_of_its_speedup() -> None:
    found = changes_between(comparison(), slower(comparison(), "fused", 1.2))
    assert [(c.architecture, c.figure) for c in regressions(found)] == [("fused", "speedup")]
    assert any("REGRESSION" in line and "-16.7 %" in line for line in regression_lines(found, ()))


def test_under_load_nothing_is_a_regression() -> None:
    before = comparison()
    for record in before["records"]:
        record["sent_s"] = 0.5
    found = changes_between(before, slower(before, "fused", 1.2))
    assert not regressions(found)
    assert any(change.beyond_noise for change in found)


def test_a_faster_one_is_a_change_beyond_noise_and_no_regression() -> None:
    found = changes_between(comparison(), slower(comparison(), "fused", 0.8))
    assert not regressions(found)
    assert any(c.figure == "speedup" and c.beyond_noise for c in found)


def test_a_slower_machine_is_only_plain_decodings_regression() -> None:
    found = changes_between(comparison(), slower(slower(comparison(), "fused", 1.3), "autoregressive", 1.3))
    assert [(c.architecture, c.figure) for c in regressions(found)] == [("autoregressive", "tpot")]


def test_fewer_accepted_tokens_are_a_regression() -> None:
    worse = comparison()
    for record in worse["records"]:
        record["accepted"] //= 2
    assert [c.figure for c in regressions(changes_between(comparison(), worse))] == ["acceptance rate"]


def test_noise_is_not_called_a_regression() -> None:
    noisy = comparison()
    for i, record in enumerate(noisy["records"]):
        record["tpot_s"] *= 1.06 if i % 2 else 0.96
    assert not regressions(changes_between(comparison(), noisy))


def test_other_tokens_settings_and_machines_are_named() -> None:
    other = comparison()
    other["records"][-1]["output_token_ids"] = [9]
    other["settings"]["speculation_length"] = 5
    other["machine"]["cores"] = 64
    found = list(differences(comparison(), other))
    assert "1 requests produced other tokens than before, the first: base, fused, code/4" in found
    assert "speculation_length: 3 then, 5 now" in found
    assert any("machines differ" in remark for remark in found)


def test_what_only_one_run_has_is_named() -> None:
    less = comparison()
    less["records"] = [r for r in less["records"] if r["architecture"] != "fused"]
    assert "base, fused: not in both" in list(differences(less, comparison()))


def test_two_prompts_are_too_few_to_judge() -> None:
    few, worse = comparison(), slower(comparison(), "fused", 2.0)
    for of in (few, worse):
        of["records"] = [r for r in of["records"] if r["prompt"] in ("code/0", "code/1")]
    found = changes_between(few, worse)
    assert not regressions(found)
    assert any("too few prompts for an interval" in line for line in regression_lines(found, ()))
