"""Theory beside measurement where lengths were chosen by measurement (auto), on requests made from known costs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace

import pytest

from tandem.comparison.analysis.decision import Decision, decide
from tandem.comparison.analysis.drafts import drafted, rates_at_fixed
from tandem.comparison.analysis.findings import Theory, model_from_json, theory_as_json, theory_of
from tandem.comparison.analysis.predictions import NOTES_ON_AUTO
from tandem.comparison.analysis.summary import summarize
from tandem.comparison.analysis.verdicts import verdict
from tandem.comparison.links.settings import LinkSettings
from tandem.comparison.measuring.calibration import Calibration
from tandem.comparison.measuring.conditions import plan
from tandem.comparison.measuring.records import Measurement, Record, Seconds
from tests.comparison.fakes import ASKED, MEASUREMENT, run_of
from tests.comparison.test_predictions import DRAFT, DRAFT_FIXED, FIXED, OVERHEAD, PLAIN, PREFILL, RPC, SLOPE, request

Mix = Mapping[int, tuple[int, int]]
"""Rounds, and the tokens accepted in each of them, by draft length."""
NEAR: Mix = {0: (10, 0), 2: (20, 1), 5: (10, 4)}
FAR: Mix = {4: (15, 2), 5: (15, 4)}
RTT = 30.0
DRAFTING = ("distributed", "fused", "remote_draft")


def chosen(name: str, mix: Mix, rtt: float = 0.0) -> Measurement:
    """A request whose rounds had different lengths, at the costs of `request`."""
    whole = request(name, 0)
    rounds, drafts = sum(n for n, _ in mix.values()), {k: n for k, (n, _) in mix.items() if k}
    accepted = sum(n * a for n, a in mix.values())
    seconds = Seconds(
        sum(n * (DRAFT_FIXED + DRAFT * k) for k, n in drafts.items()),
        sum(n * (FIXED + SLOPE * (k + 1)) for k, (n, _) in mix.items()),
        rounds * OVERHEAD,
        {"distributed": rounds, "remote_draft": sum(drafts.values())}.get(name, 0) * (RPC + rtt),
        PREFILL,
        0.0,
    )
    end_to_end, tokens, longest = sum(asdict(seconds).values()), rounds + accepted, max(mix)
    ttft = PREFILL + (end_to_end - PREFILL) / rounds
    return replace(
        whole,
        output_token_ids=(1,) * tokens,
        output_tokens=tokens,
        rounds=rounds,
        drafted=sum(k * n for k, n in drafts.items()),
        accepted=accepted,
        accepted_per_position=tuple(sum(n for n, a in mix.values() if a > i) for i in range(longest)),
        drafted_per_position=tuple(sum(n for k, (n, _) in mix.items() if k > i) for i in range(longest)),
        ttft_s=ttft,
        end_to_end_latency_s=end_to_end,
        tpot_s=(end_to_end - ttft) / (tokens - 1),
        seconds_by_cause=seconds,
    )


def records() -> list[Record]:
    return [
        Record(
            name,
            f"code/{i}",
            "code",
            0,
            request(name, 0) if name == "autoregressive" else chosen(name, mix, c.link.seconds),
            condition=c.name,
        )
        for c, mix in zip(plan(ASKED, (0.0, RTT)), (NEAR, FAR), strict=True)
        for name in ("autoregressive", *DRAFTING)
        for i in range(4)
    ]


def alone(name: str, length: int) -> Measurement:
    """A calibration request: a target whose draft is elsewhere asks for none in rounds of length 0."""
    of = request(name, length)
    silent = name == "remote_draft" and not length
    return replace(of, seconds_by_cause=replace(of.seconds_by_cause, network=0.0), bytes_up=0) if silent else of


def calibrations() -> list[Calibration]:
    found = [Calibration(name, g, alone(name, g)) for name in DRAFTING for g in range(6)]
    return [*found, Calibration("autoregressive", 0, request("autoregressive", 0))]


def theory(found: list[Calibration] | None = None) -> Theory:
    conditions = plan(ASKED, (0.0, RTT))
    summaries = {c.name: summarize([r for r in records() if r.condition == c.name], None, None) for c in conditions}
    made = theory_of(conditions, summaries, records(), calibrations() if found is None else found, None)
    assert made is not None
    return made


def test_every_prediction_meets_the_times_that_were_made_from_the_lengths_of_each_link() -> None:
    measured = {(p.condition, p.architecture): p for p in theory().predictions if p.measured_tpot_s is not None}
    assert len(measured) == 8
    for prediction in measured.values():
        assert prediction.error == pytest.approx(0, abs=1e-9), prediction
    near, far = (measured[c.name, "fused"].predicted_tpot_s for c in plan(ASKED, (0.0, RTT)))
    assert near != pytest.approx(far, rel=0.02)


def test_a_round_costs_the_mean_of_its_lengths_and_one_without_a_draft_no_drafting() -> None:
    draft, verify = theory().model.round_parts("fused")
    assert draft == pytest.approx((20 * (DRAFT_FIXED + 2 * DRAFT) + 10 * (DRAFT_FIXED + 5 * DRAFT)) / 40)
    assert verify == pytest.approx(FIXED + SLOPE * (1 + (20 * 2 + 10 * 5) / 40))


def test_the_break_even_and_the_busy_target_are_those_of_the_bases_lengths() -> None:
    made = theory()
    draft, verify = made.model.round_parts("distributed")
    tokens = (40 + 20 + 40) / 40
    assert made.break_even_rtt_s == pytest.approx(tokens * (PLAIN + OVERHEAD) - draft - verify - OVERHEAD - RPC)
    assert made.break_even_interval_s is not None
    even = LinkSettings(1000 * made.break_even_rtt_s)
    per_token = made.model.tpot("distributed", even)
    request_tokens = 100
    flattered = (request_tokens - tokens) / (request_tokens - 1)
    assert per_token == pytest.approx((PLAIN + OVERHEAD) * flattered)
    assert made.model.target_seconds("distributed") == pytest.approx(verify / tokens)
    assert made.model.target_seconds("fused") == pytest.approx((verify + draft) / tokens)
    assert made.model.capacity_gain() == pytest.approx(1 + draft / verify)


def test_fixed_lengths_are_predicted_from_requests_that_had_one_and_not_from_what_auto_chose() -> None:
    made = theory()
    assert made.model.at_fixed["fused"] == pytest.approx((0.8, 0.75, 0.5, 1.0, 1.0))
    assert made.model.drafts["fused"].rates == pytest.approx((30 / 40, 10 / 30, 1.0, 1.0, 0.0))
    rounds_take = FIXED + 4 * SLOPE + DRAFT_FIXED + 3 * DRAFT + OVERHEAD
    assert made.model.tpot("fused", LinkSettings(0.0), 3) == pytest.approx(rounds_take / 2.7 * (100 - 2.7) / 99)
    assert {len(best.tpot_s_by_length) for best in made.best_lengths} == {6}


def test_a_longer_length_never_promises_fewer_tokens_than_a_shorter_one_was_seen_to_reach() -> None:
    lucky = replace(request("fused", 2), accepted_per_position=(10, 10))
    unlucky = replace(request("fused", 1), accepted_per_position=(0,))
    rates = rates_at_fixed([Calibration("fused", 1, unlucky), Calibration("fused", 2, lucky)])
    assert rates == pytest.approx((10 / 40, 1.0))
    assert rates_at_fixed([Calibration("fused", 0, request("fused", 0))]) == ()
    assert rates_at_fixed([Calibration("fused", 2, MEASUREMENT)]) == pytest.approx((0.5, 0.0))


def test_a_target_that_never_waits_may_verify_any_length_and_is_never_above_plain_decoding() -> None:
    made = theory()
    found = [made.model.tpot("never_waiting", LinkSettings(rtt)) for rtt in (0.0, 20.0, 500.0)]
    assert found == sorted(found)
    assert found[-1] <= made.model.plain_tpot * (1 + 1e-9)
    of = replace(made.model.drafts["distributed"], rates=made.model.at_fixed["distributed"])
    alike = replace(made.model, length=5, drafts={"distributed": of})
    assert found[0] == pytest.approx(alike.tpot("never_waiting", LinkSettings(0.0)))


def test_what_was_written_predicts_as_before() -> None:
    made = theory()
    written = json.loads(json.dumps(theory_as_json(made)))
    assert written["length"] is None
    assert [note for note in written["notes"] if note in NOTES_ON_AUTO] == list(NOTES_ON_AUTO)
    again = model_from_json(written)
    for name in ("autoregressive", "distributed", "fused", "pipelined", "never_waiting"):
        for length in (None, 2):
            assert again.tpot(name, LinkSettings(33.0), length) == pytest.approx(
                made.model.tpot(name, LinkSettings(33.0), length)
            )
    assert again.capacity_gain() == pytest.approx(made.model.capacity_gain())


def test_a_run_cut_short_before_a_draft_was_costed_has_no_theory() -> None:
    cut = [one for one in calibrations() if one.length == 0]
    summaries = {c.name: summarize(records(), None, None) for c in plan(ASKED)}
    assert theory_of(plan(ASKED), summaries, records(), cut, None) is None


def test_a_link_whose_rounds_had_no_draft_is_predicted_from_rounds_without_one() -> None:
    conditions = plan(ASKED, (0.0, RTT))
    rests: Mix = {0: (40, 0)}
    changed = [
        replace(r, measurement=chosen("fused", rests)) if r.condition != "base" and r.architecture == "fused" else r
        for r in records()
    ]
    summaries = {c.name: summarize([r for r in changed if r.condition == c.name], None, None) for c in conditions}
    made = theory_of(conditions, summaries, changed, calibrations(), None)
    assert made is not None
    (found,) = (p for p in made.predictions if p.architecture == "fused" and p.rtt_ms == RTT)
    assert found.error == pytest.approx(0, abs=1e-9)
    assert found.predicted_tpot_s == pytest.approx(PLAIN + OVERHEAD)


def decision(made: Theory) -> Decision:
    (base,) = plan(ASKED)
    own = [r for r in records() if r.condition == "base"]
    summaries = summarize(own, "autoregressive", "autoregressive")
    found = verdict(run_of(own), base, summaries, made)
    assert found is not None
    decided = decide(found[0], base, summaries, made, adaptive=True)
    assert decided is not None and decided.architecture == "fused"
    return decided


def test_the_decision_says_what_auto_drafted_and_that_no_fixed_length_is_clearly_faster() -> None:
    made = theory()
    hopeless = replace(
        made, best_lengths=tuple(replace(b, tpot_s_by_length=(0.01, 1.0, 1.0)) for b in made.best_lengths)
    )
    found = decision(hopeless)
    assert found.speculation_length is None
    because = " ".join(found.because)
    assert "chosen by measurement (auto): 2.25 tokens a round on average, none in 25 % of the rounds." in because
    assert "No fixed speculation length of those costed is predicted to be clearly faster than auto." in because
    assert "--speculation-length" not in because


def test_a_fixed_length_that_is_predicted_to_be_clearly_faster_than_auto_is_named() -> None:
    made = theory()
    ran = next(p.predicted_tpot_s for p in made.predictions if p.architecture == "fused")
    better = (0.001, ran, 0.8 * ran, 0.9 * ran)  # plain decoding is no fixed length to draft with
    found = decision(replace(made, best_lengths=tuple(replace(b, tpot_s_by_length=better) for b in made.best_lengths)))
    said = "Speculation length 2 is predicted to save 20 % of the time per token over auto: compare with"
    assert any(sentence.startswith(f"{said} --speculation-length 2 ") for sentence in found.because)


def test_lengths_are_counted_over_all_requests() -> None:
    assert drafted({"a": [chosen("fused", NEAR)], "b": [chosen("fused", FAR)]}).rounds_by_length == (
        10,
        0,
        20,
        0,
        15,
        25,
    )
