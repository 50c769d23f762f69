"""Theory beside measurement, on requests whose times were made from known costs."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from tandem.comparison.analysis.summary import summarize
from tandem.comparison.analysis.theory import Theory, costs_by_architecture, line, theory_of
from tandem.comparison.links.link_settings import LinkSettings
from tandem.comparison.measuring.conditions import plan
from tandem.comparison.measuring.records import Measurement, Record, Seconds
from tests.comparison.fakes import ASKED, MEASUREMENT

FIXED, SLOPE, DRAFT_FIXED, DRAFT, OVERHEAD, RPC = 0.036, 0.004, 0.001, 0.002, 0.0005, 0.001
PREFILL = 0.1
DRAFTING = ("distributed", "fused")


def request(name: str, length: int, rounds: int = 20, rtt: float = 0.0) -> Measurement:
    """A request as an architecture of these costs would serve it: of 20 rounds 16 accept a draft, 12 two, 6 three."""
    accepted = tuple(round(rounds * share) for share in (0.8, 0.6, 0.3, 0.3, 0.3)[:length])
    tokens = rounds + sum(accepted)
    draft = rounds * (DRAFT_FIXED + DRAFT * length) if length else 0.0
    network = rounds * (RPC + rtt) if name == "distributed" else 0.0
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


def theory(rtts: tuple[float, ...] = (0.0, 20.0, 60.0)) -> Theory:
    conditions = plan(ASKED, [LinkSettings(rtt) for rtt in rtts])
    names = ("autoregressive", *DRAFTING)
    records = [
        Record(name, f"code/{i}", "code", 0, request(name, 3 if name in DRAFTING else 0, 20, c.link.seconds),
               condition=c.name)
        for c in conditions
        for name in names
        for i in range(4)
    ]  # fmt: skip
    found = {name: {g: [request(name, g)] for g in range(1, 6)} for name in DRAFTING}
    found["autoregressive"] = {0: [request("autoregressive", 0)]}
    summaries = {
        c.name: [summarize(name, [r for r in records if r.condition == c.name], "autoregressive") for name in names]
        for c in conditions
    }
    made = theory_of(conditions, summaries, found)
    assert made is not None
    return made


@pytest.mark.parametrize("link", [LinkSettings(), LinkSettings(50.0), LinkSettings(50.0, 0.4)])
def test_component_times_are_found_again_and_a_link_that_was_there_is_taken_out(link: LinkSettings) -> None:
    found = {g: [request("distributed", g, rtt=link.round_trip(50))] for g in range(1, 6)}
    of = costs_by_architecture({"distributed": found}, link)["distributed"]
    assert (of.verify_fixed_s, of.verify_slope_s) == pytest.approx((FIXED, SLOPE))
    assert (of.draft_fixed_s, of.draft_slope_s) == pytest.approx((DRAFT_FIXED, DRAFT))
    assert (of.overhead_s, of.rpc_s) == pytest.approx((OVERHEAD, RPC))
    assert of.message_bytes == pytest.approx(50)


def test_no_part_of_a_line_is_below_0() -> None:
    assert line([(1.0, 0.3), (2.0, 0.5)]) == pytest.approx((0.1, 0.2))
    assert line([(1.0, 0.5), (2.0, 0.3)]) == pytest.approx((0.4, 0.0))
    assert line([(1.0, 0.1), (2.0, 0.5)]) == pytest.approx((0.0, 0.2))
    assert line([(3.0, 0.3)]) == (0.3, 0.0) and line([]) == (0.0, 0.0)


def test_every_prediction_meets_the_times_that_were_made_from_the_same_costs() -> None:
    made = theory()
    assert len(made.predictions) == 9
    for prediction in made.predictions:
        assert prediction.error == pytest.approx(0, abs=0.01) and not prediction.missed


def test_at_the_break_even_distributed_takes_as_long_as_plain_decoding() -> None:
    made = theory()
    assert made.break_even_rtt_s is not None
    at = LinkSettings(1000 * made.break_even_rtt_s)
    assert made.tpot_s("distributed", at) == pytest.approx(made.plain_tpot_s, rel=1e-3)


def test_the_best_length_has_the_least_time_and_drafts_apart_serve_more_clients() -> None:
    made = theory()
    assert made.best_lengths == {"distributed": 5, "fused": 5}
    assert made.capacity_gain == pytest.approx(1 + (DRAFT_FIXED + 3 * DRAFT) / (FIXED + 4 * SLOPE))


def test_without_plain_decoding_or_drafts_nothing_is_predicted() -> None:
    conditions = plan(ASKED)
    records = [Record("fused", "code/a", "code", 0, request("fused", 3))]
    summaries = {"base": [summarize("fused", records, None)]}
    assert theory_of(conditions, summaries, {"fused": {3: [request("fused", 3)]}}) is None
    plain = {"base": [summarize("autoregressive", [record_of("autoregressive")], "autoregressive")]}
    assert theory_of(conditions, plain, {"autoregressive": {0: [request("autoregressive", 0)]}}) is None


def record_of(name: str) -> Record:
    return Record(name, "code/a", "code", 0, request(name, 0))
