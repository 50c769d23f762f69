"""The sentences that decide, from figures that are known."""

from __future__ import annotations

from dataclasses import replace

from tandem.comparison.analysis.decision import Decision, decide
from tandem.comparison.analysis.findings import Theory
from tandem.comparison.analysis.predictions import best_length
from tandem.comparison.analysis.summary import summarize
from tandem.comparison.analysis.verdicts import verdict
from tandem.comparison.links.settings import LinkSettings
from tandem.comparison.measuring.conditions import Condition, plan
from tandem.comparison.measuring.records import Record
from tests.comparison.fakes import ASKED, run_of
from tests.comparison.test_predictions import request, theory


def decided(
    base: Condition, records: list[Record], of: Theory | None, plain: str | None = "autoregressive"
) -> Decision | None:
    """Decides as a run does: the verdict first."""
    summaries = summarize(records, "autoregressive", plain)
    found = verdict(run_of(records), base, summaries, of)
    return None if found is None else decide(found[0], base, summaries, of)


def decision(
    of: Theory | None, tokens: tuple[int, ...] | None = None, slower: float = 1.0, more: tuple[str, ...] = ()
) -> Decision | None:
    records = [
        Record(name, f"code/{i}", "code", 0, request(name, length, 20 + i))
        for name, length in (("autoregressive", 0), ("distributed", 3), ("fused", 3), *((name, 3) for name in more))
        for i in range(4)
    ]
    same = [replace(r, measurement=replace(r.measurement, output_token_ids=(1, 2))) for r in records if r.measurement]
    diverged_prompts = [
        replace(
            r,
            measurement=replace(r.measurement, output_token_ids=tokens or (1, 2), tpot_s=r.measurement.tpot_s * slower),
        )
        if r.architecture == "fused" and r.measurement and r.measurement.tpot_s
        else r
        for r in same
    ]
    return decided(plan(ASKED)[0], diverged_prompts, of)


def test_the_headline_names_the_best_and_by_how_much_and_the_break_even() -> None:
    found = decision(theory())
    assert found is not None
    assert found.architecture == "fused"
    assert found.headline == "Here, use fused: draft and target in one server"
    assert found.ratios.startswith("On this link (not emulated) fused is 1.0")
    assert "times faster than distributed and 1.90" in found.ratios
    assert found.ratios.endswith("times faster than plain decoding; distributed beats plain decoding below 49 ms RTT.")
    assert found.speedup_interval is not None
    assert found.speedup_interval[0] <= (found.speedup or 0) <= found.speedup_interval[1]


def test_it_says_how_sure_it_is_and_that_tokens_were_identical() -> None:
    found = decision(theory())
    assert found is not None
    because = " ".join(found.because)
    assert "95 % interval" in because
    assert "over 4 requests" in because
    assert "Every output was token-identical to plain decoding." in because
    assert "miss the 9 measured times per token by" in because


def test_outputs_that_parted_are_not_passed_over() -> None:
    found = decision(theory(), tokens=(1, 3))
    assert found is not None
    assert "4 outputs differ from plain decoding's" in " ".join(found.because)


def test_another_architecture_is_chosen_where_it_is_faster() -> None:
    slow = decision(theory(), slower=1.5)
    assert slow is not None and slow.architecture == "distributed"
    assert any("A round trip above 49 ms" in sentence for sentence in slow.would_change)
    assert slow.headline == "Here, use distributed: draft apart from the target"
    assert "fused" in slow.ratios


def test_where_a_target_that_never_waits_pays_is_said_unless_its_predictions_missed() -> None:
    good = theory()
    told = decision(good, more=("never_waiting",))
    assert told is not None and good.waiting_pays_until_s is not None
    said = (*told.because, *told.would_change)
    assert any("A target that never waits is predicted to beat rounds that wait" in each for each in said)
    assert any("never waiting above." in each for each in said)
    off = [
        replace(p, measured_tpot_s=1.5 * p.predicted_tpot_s) if p.architecture == "never_waiting" else p
        for p in good.predictions
    ]
    silent = decision(replace(good, predictions=off), more=("never_waiting",))
    assert silent is not None
    assert not any("never wait" in each for each in (*silent.because, *silent.would_change))
    assert any("the target's host cannot hold the draft: distributed below 49 ms" in s for s in silent.would_change)


def test_plain_decoding_wins_with_length_0_where_drafts_only_cost() -> None:
    records = [
        Record(name, f"code/{i}", "code", 0, replace(request(name, 0), tpot_s=tpot))
        for name, tpot in (("autoregressive", 0.04), ("fused", 0.05))
        for i in range(3)
    ]
    found = decided(plan(ASKED)[0], records, None, None)
    assert found is not None
    assert (found.architecture, found.speculation_length) == ("autoregressive", 0)
    assert found.headline == "Here, decode plainly: drafts cost more than they save"
    assert found.ratios == "On this link (not emulated) plain decoding is 1.25 times faster than fused."


def test_nothing_is_decided_from_one_architecture() -> None:
    records = [Record("fused", "code/a", "code", 0, request("fused", 3))]
    assert decided(plan(ASKED)[0], records, None, None) is None


def test_an_emulated_link_is_called_so() -> None:
    records = [
        Record(name, "code/a", "code", 0, request(name, length))
        for name, length in (("autoregressive", 0), ("fused", 3))
    ]
    (base,) = plan(ASKED, (20.0,))
    found = decided(base, records, None, None)
    assert found is not None and "On this link (emulated, RTT 20 ms) fused is" in found.ratios
    assert found.headline.startswith("At 20 ms, nothing can be decided: too few prompts")


def test_a_run_cut_short_before_its_own_length_was_costed_is_decided() -> None:
    whole = theory()
    costs = {n: replace(c, draft_s_by_length={1: 0.003}) for n, c in whole.model.costs.items()}
    model = replace(whole.model, costs=costs)
    cut = replace(whole, model=model, best_lengths=(best_length(model, "fused", LinkSettings()),))
    assert len(cut.best_lengths[0].tpot_s_by_length) == 4  # up to the 3 that ran
    found = decision(cut)
    assert found is not None
    assert found.speculation_length == 3
