"""Two runs beside each other."""

from __future__ import annotations

import copy
from random import Random
from typing import Any

import pytest

from tandem.comparison.analysis.regression import (
    NOT_JUDGED,
    REGRESSED,
    Change,
    changes_between,
    differences,
    judge,
    regression_lines,
)
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


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0])
def test_what_drafted_other_lengths_is_not_judged_and_plain_decoding_is(
    factor: float, capsys: pytest.CaptureFixture[str]
) -> None:
    auto = slower(comparison(), "fused", factor)
    auto["settings"]["speculation_length"] = None
    assert code_of(comparison(), auto) == NOT_JUDGED
    said = capsys.readouterr().out
    assert "fused, speedup: " in said and "NOT JUDGED: speculation length 3 then, auto now" in said
    assert "speculation_length: 3 then, auto now" in said.splitlines()
    assert code_of(comparison(), slower(auto, "autoregressive", 1.3)) == REGRESSED
    assert code_of(auto, auto) == 0


def test_what_only_one_run_has_is_named() -> None:
    less = comparison()
    less["records"] = [r for r in less["records"] if r["architecture"] != "fused"]
    assert "base, fused: not in both" in list(differences(less, comparison()))


def code_of(before: dict[str, Any], after: dict[str, Any]) -> int:
    return judge({**before, "started_at": "then"}, after)


def of_prompts(of: dict[str, Any], *prompts: str) -> dict[str, Any]:
    return {**of, "records": [r for r in of["records"] if r["prompt"] in prompts]}


def jittered(of: dict[str, Any]) -> dict[str, Any]:
    """Times as a busy machine makes them: up to three times as long, by chance."""
    changed, random = copy.deepcopy(of), Random(4)
    for record in changed["records"]:
        record["tpot_s"] *= random.uniform(1, 3)
    return changed


def test_the_exit_code_of_a_regression_is_3_and_that_of_none_is_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of(comparison(), comparison()) == 0
    assert "no regression beyond noise" in capsys.readouterr().out
    assert code_of(comparison(), slower(comparison(), "fused", 1.2)) == REGRESSED == 3
    assert "1 regression beyond noise" in capsys.readouterr().out


@pytest.mark.parametrize("prompts", [("code/0",), ("code/0", "code/1"), ("code/0", "code/1", "code/2")])
@pytest.mark.parametrize("architecture", ["autoregressive", "fused"])
def test_a_tenfold_regression_never_exits_0(
    prompts: tuple[str, ...], architecture: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = of_prompts(jittered(comparison()), *prompts)
    worse = of_prompts(jittered(slower(comparison(), architecture, 10.0)), *prompts)
    assert code_of(before, worse) in (REGRESSED, NOT_JUDGED)
    assert "no regression" not in capsys.readouterr().out


@pytest.mark.parametrize("figure", ["ttft_s", "tpot_s"])
def test_a_tenfold_regression_of_any_time_counts_where_plain_decoding_did_not_run(figure: str) -> None:
    before = comparison() | {"baseline": None}
    before["records"] = [r for r in before["records"] if r["architecture"] == "fused"]
    worse = copy.deepcopy(before)
    for record in worse["records"]:
        record[figure] *= 10
    assert code_of(before, worse) == (REGRESSED if figure == "tpot_s" else NOT_JUDGED)


def test_a_tenfold_regression_under_load_is_not_judged_and_not_passed(capsys: pytest.CaptureFixture[str]) -> None:
    before = comparison()
    for record in before["records"]:
        record["sent_s"] = 0.5
    assert code_of(before, slower(before, "fused", 10.0)) == NOT_JUDGED
    assert "NOT JUDGED: requests beside each other are not independent" in capsys.readouterr().out


def test_drafts_that_are_no_longer_accepted_at_all_are_a_regression() -> None:
    worse = comparison()
    for record in worse["records"]:
        record["accepted"] = 0
    assert code_of(comparison(), worse) == REGRESSED


def test_runs_without_a_prompt_in_common_are_not_judged(capsys: pytest.CaptureFixture[str]) -> None:
    other = comparison()
    for record in other["records"]:
        record["prompt"] += " other"
    assert code_of(comparison(), other) == NOT_JUDGED == 5
    assert "no figure in common" in capsys.readouterr().out


def test_a_change_for_the_worse_on_a_busy_machine_is_not_judged(capsys: pytest.CaptureFixture[str]) -> None:
    worse = slower(comparison(), "fused", 1.5)
    for record in worse["records"]:
        record["machine_load"] = {"load_average": 17.0, "waiting": 15, "others": 0.6, "steal": 0.0}
    assert code_of(comparison(), worse) == NOT_JUDGED
    assert "NOT JUDGED: this machine was busy during this run" in capsys.readouterr().out


def test_two_prompts_are_too_few_to_judge() -> None:
    few, worse = comparison(), slower(comparison(), "fused", 2.0)
    for of in (few, worse):
        of["records"] = [r for r in of["records"] if r["prompt"] in ("code/0", "code/1")]
    found = changes_between(few, worse)
    assert not regressions(found)
    assert any("NOT JUDGED: too few prompts for an interval" in line for line in regression_lines(found, ()))
    assert list(regression_lines(found, ()))[-1].startswith("not judged: ")
