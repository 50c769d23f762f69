"""Theory beside measurement, on requests whose times were made from known costs."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from tandem.comparison.analysis.costs import costs_by_architecture
from tandem.comparison.analysis.drafts import drafted
from tandem.comparison.analysis.findings import Theory, model_from_json, theory_as_json, theory_of
from tandem.comparison.analysis.predictions import best_length, crossing
from tandem.comparison.analysis.summary import summarize
from tandem.comparison.links.settings import LinkSettings
from tandem.comparison.measuring.calibration import Calibration
from tandem.comparison.measuring.conditions import plan
from tandem.comparison.measuring.records import Measurement, Record, Seconds
from tests.comparison.fakes import ASKED, MEASUREMENT

PLAIN, FIXED, SLOPE, DRAFT_FIXED, DRAFT, OVERHEAD, RPC = 0.040, 0.036, 0.004, 0.001, 0.002, 0.0005, 0.001
PREFILL = 0.1


def request(name: str, length: int, rounds: int = 20, rtt: float = 0.0) -> Measurement:
    """A request as an architecture of these costs would serve it: of 20 rounds 16 accept a draft, 12 two, 6 three."""
    split = name in ("distributed", "pipelined", "never_waiting", "remote_draft")
    accepted = tuple(round(rounds * share) for share in (0.8, 0.6, 0.3, 0.3, 0.3)[:length])
    tokens = rounds + sum(accepted)
    draft = rounds * (DRAFT_FIXED + DRAFT * length) if length else 0.0
    network = rounds * (RPC + rtt) if split else 0.0
    seconds = Seconds(draft, rounds * (FIXED + SLOPE * (length + 1)), rounds * OVERHEAD, network, PREFILL, 0.0)
    end_to_end = sum(asdict(seconds).values())
    ttft = PREFILL + (end_to_end - PREFILL) / rounds
    return replace(
        MEASUREMENT,
        output_token_ids=(1,) * tokens,
        output_tokens=tokens,
        rounds=rounds,
        drafted=rounds * length,
        accepted=sum(accepted),
        accepted_per_position=accepted,
        drafted_per_position=(rounds,) * length,
        ttft_s=ttft,
        end_to_end_latency_s=end_to_end,
        tpot_s=(end_to_end - ttft) / (tokens - 1),
        bytes_up=rounds * 30,
        bytes_down=rounds * 20,
        seconds_by_cause=seconds,
    )


def theory(rtts: tuple[float, ...] = (0.0, 20.0, 60.0), names: tuple[str, ...] = ("distributed", "fused")) -> Theory:
    conditions = plan(ASKED, rtts)
    records = [
        Record(
            name,
            f"code/{i}",
            "code",
            0,
            request(name, 0 if name == "autoregressive" else 3, 20 + i, c.link.seconds),
            condition=c.name,
        )
        for c in conditions
        for name in ("autoregressive", *names)
        for i in range(0, 20, 5)
    ]
    costed = [name for name in names if name != "pipelined"]
    found = [Calibration(name, g, request(name, g)) for name in costed for g in range(1, 6)]
    found.append(Calibration("autoregressive", 0, request("autoregressive", 0)))
    summaries = {
        c.name: summarize([r for r in records if r.condition == c.name], "autoregressive", None) for c in conditions
    }
    made = theory_of(conditions, summaries, records, found, 3)
    assert made is not None
    return made


def test_component_times_are_found_again() -> None:
    found = [Calibration("distributed", g, request("distributed", g)) for g in range(1, 6)]
    costs = costs_by_architecture(found, LinkSettings())
    of = costs["distributed"]
    assert (of.verify_fixed_s, of.verify_slope_s) == pytest.approx((FIXED, SLOPE))
    assert (of.draft_fixed_s, of.draft_slope_s) == pytest.approx((DRAFT_FIXED, DRAFT))
    assert (of.round_overhead_s, of.rpc_s) == pytest.approx((OVERHEAD, RPC))
    assert of.message_bytes == pytest.approx(50)


def test_a_link_that_was_there_while_calibrating_is_taken_out() -> None:
    found = [Calibration("distributed", 3, request("distributed", 3, rtt=0.05))]
    assert costs_by_architecture(found, LinkSettings(50.0))["distributed"].rpc_s == pytest.approx(RPC)


def test_so_is_the_time_that_its_bandwidth_takes() -> None:
    sending = LinkSettings(50.0, 0.4)
    found = [Calibration("distributed", 3, request("distributed", 3, rtt=sending.round_trip(50)))]
    assert costs_by_architecture(found, sending)["distributed"].rpc_s == pytest.approx(RPC)


def test_rates_are_of_all_rounds_and_multiply_to_the_tokens_of_a_round() -> None:
    of = drafted({"a": [request("fused", 3)], "b": [request("fused", 3)]})
    assert of.rates == pytest.approx((0.8, 0.75, 0.5))
    assert of.per_round == pytest.approx(1 + 0.8 + 0.6 + 0.3)
    assert of.by_prompt == ((20, 34), (20, 34))


def test_every_prediction_meets_the_times_that_were_made_from_the_same_costs() -> None:
    made = theory()
    checked = [p for p in made.predictions if p.measured_tpot_s is not None]
    assert len(checked) == 9
    for prediction in checked:
        assert prediction.error == pytest.approx(0, abs=0.01), prediction
    assert {p.architecture for p in made.predictions if p.measured_tpot_s is None} == {"pipelined", "never_waiting"}


def test_a_target_that_never_waits_is_predicted_from_the_costs_of_rounds_and_never_above_plain_decoding() -> None:
    made = theory()
    plain = made.model.plain_tpot
    rtts = (0.0, 5.0, 20.0, 60.0, 500.0)
    found = [made.model.tpot("never_waiting", LinkSettings(rtt)) for rtt in rtts]
    assert found == sorted(found)
    assert made.model.tpot("fused", LinkSettings(0.0)) < found[0] < found[-1] <= plain * (1 + 1e-9)
    assert made.waiting_pays_until_s is not None
    until = LinkSettings(1000 * made.waiting_pays_until_s)
    assert made.model.tpot("never_waiting", until) < made.model.tpot("distributed", until)
    assert made.model.tpot("never_waiting", LinkSettings(0.0)) > made.model.tpot("distributed", LinkSettings(0.0))


def test_a_target_that_never_waits_is_as_fast_as_lookup_where_no_draft_comes_in_time() -> None:
    alone, beside = theory(), theory(names=("distributed", "lookup"))
    model = beside.model
    assert alone.model.copies is None and model.copies is not None and model.copies.tokens == pytest.approx(2.7)
    assert model_from_json(theory_as_json(beside)).copies == model.copies
    a_copy = (FIXED + 4 * SLOPE + OVERHEAD) / model.copies.tokens
    far = LinkSettings(5000.0)
    assert model.tpot("never_waiting", far) == pytest.approx(a_copy, rel=0.02)
    assert (
        model.tpot("never_waiting", LinkSettings(5.0)) <= a_copy * (1 + 1e-9) < alone.model.tpot("never_waiting", far)
    )


def test_a_pipelined_run_stands_beside_its_bound_and_is_no_prediction_that_missed() -> None:
    made = theory(names=("distributed", "pipelined"))
    found = [p for p in made.predictions if p.architecture == "pipelined"]
    assert [p.rtt_ms for p in found] == [0, 20, 60]
    assert all(p.measured_tpot_s and p.error is not None and p.error < 0 for p in found)  # ran as stop-and-wait here
    assert list(made.model.drafts) == ["distributed"]
    assert {best.architecture for best in made.best_lengths} == {"distributed"}


def test_the_break_even_lies_where_predicted_and_measured_lines_cross() -> None:
    made = theory((0.0, 20.0, 40.0, 60.0))
    rounds_take = FIXED + 4 * SLOPE + DRAFT_FIXED + 3 * DRAFT + OVERHEAD + RPC
    assert made.break_even_rtt_s == pytest.approx(2.7 * (PLAIN + OVERHEAD) - rounds_take)
    # TPOT counts the first chunk's tokens but not its time, which flatters rounds of several tokens a little.
    assert made.break_even_rtt_s < (made.measured_break_even_rtt_s or 0) < 1.08 * made.break_even_rtt_s
    assert made.break_even_interval_s is not None
    low, high = made.break_even_interval_s
    assert low <= made.break_even_rtt_s <= high


def test_the_best_length_is_least_in_its_own_list_and_grows_with_the_round_trip() -> None:
    model = theory().model
    near, far = (best_length(model, "distributed", LinkSettings(rtt)) for rtt in (0.0, 200.0))
    assert len(near.tpot_s_by_length) == 6  # 0 to 5 were costed
    assert near.tpot_s == min(near.tpot_s_by_length)
    assert near.tpot_s_by_length[0] == pytest.approx(PLAIN + OVERHEAD)
    assert near.closed_form is not None and far.closed_form is not None
    assert near.closed_form < far.closed_form
    without = [best_length(model, "fused", LinkSettings(rtt)).tpot_s_by_length for rtt in (0.0, 200.0)]
    assert without[0] == without[1]


def test_the_closed_form_is_next_to_the_integer_optimum_where_all_rates_are_one() -> None:
    model = theory().model
    of = model.drafts["distributed"]
    alike = replace(model, drafts={"distributed": replace(of, rates=(0.7, 0.7, 0.7))})
    for rtt in (0.0, 10.0, 20.0):
        found = best_length(alike, "distributed", LinkSettings(rtt))
        lengths = range(1, len(found.tpot_s_by_length))
        best = min(lengths, key=lambda g, found=found: found.tpot_s_by_length[g] / _shape(of.tokens, 0.7, g))
        assert found.closed_form == pytest.approx(best, abs=1)


def _shape(tokens: float, rate: float, g: int) -> float:
    """What the definition of TPOT makes of a round: the closed form knows nothing of it."""
    per_round = (1 - rate ** (g + 1)) / (1 - rate)
    return (tokens - per_round) / (tokens - 1)


def test_bandwidth_costs_what_a_round_sends() -> None:
    model = theory().model
    more = model.tpot("distributed", LinkSettings(20.0, 0.4)) - model.tpot("distributed", LinkSettings(20.0))
    assert more == pytest.approx(50 * 8 / 0.4e6 / 2.7, rel=0.05)
    assert model.tpot("fused", LinkSettings(20.0, 0.4)) == model.tpot("fused", LinkSettings(0.0))


def test_the_target_is_busy_with_drafts_only_where_they_are_beside_it() -> None:
    model = theory().model
    verify, draft = FIXED + 4 * SLOPE, DRAFT_FIXED + 3 * DRAFT
    assert model.target_seconds("distributed") == pytest.approx(verify / 2.7)
    assert model.target_seconds("fused") == pytest.approx((verify + draft) / 2.7)
    assert model.capacity_gain() == pytest.approx(1 + draft / verify)


def test_what_was_written_predicts_as_before() -> None:
    made = theory()
    again = model_from_json(theory_as_json(made))
    for name in ("autoregressive", "distributed", "fused", "pipelined"):
        assert again.tpot(name, LinkSettings(33.0)) == pytest.approx(made.model.tpot(name, LinkSettings(33.0)))


def test_without_plain_decoding_or_drafts_there_is_no_theory() -> None:
    conditions = plan(ASKED)
    records = [Record("fused", "code/a", "code", 0, request("fused", 3))]
    summaries = {"base": summarize(records, None, None)}
    assert theory_of(conditions, summaries, records, [Calibration("fused", 3, request("fused", 3))], 3) is None
    plain = [Calibration("autoregressive", 0, request("autoregressive", 0))]
    assert theory_of(conditions, summaries, records, plain, 3) is None


def test_a_crossing_is_interpolated_and_only_where_there_is_one() -> None:
    assert crossing([0, 20, 50], [-2.0, -1.0, 2.0]) == pytest.approx(30)
    assert crossing([50, 0, 20], [2.0, -2.0, -1.0]) == pytest.approx(30)
    assert crossing([0, 20], [-2.0, -1.0]) is None
    assert crossing([0, 20], [1.0, 2.0]) is None


def test_steps_that_grow_faster_than_a_line_are_costed_without_a_negative_part_and_predicted() -> None:
    """What a busy machine once measured: least squares put the fixed part below 0, and the comparison was lost."""

    def bent(name: str, length: int) -> Measurement:
        of = request(name, length)
        return replace(of, seconds_by_cause=replace(of.seconds_by_cause, verify=of.rounds * 0.001 * (length + 1) ** 2))

    names = {"autoregressive": 0, "fused": 3}
    records = [Record(name, "code/a", "code", 0, bent(name, length)) for name, length in names.items()]
    found = [Calibration("fused", g, bent("fused", g)) for g in range(1, 6) for _ in range(2)]
    found.append(Calibration("autoregressive", 0, bent("autoregressive", 0)))
    summaries = {"base": summarize(records, "autoregressive", None)}
    made = theory_of(plan(ASKED), summaries, records, found, 3)
    assert made is not None
    costs = made.model.costs["fused"]
    assert costs.verify_fixed_s == 0
    assert (costs.fits["verify"].held, costs.fits["draft"].held) == ("fixed", None)
    written = theory_as_json(made)["costs"]["architectures"]["fused"]["fits"]["verify"]
    assert written["held_at_0"] == "fixed"
    assert written["unheld_s"] < 0
    assert all(p.predicted_tpot_s > 0 for p in made.predictions)
