"""Metrics against values worked out by hand."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from tandem.comparison.analysis.metrics import (
    SentAhead,
    acceptance,
    completed,
    milliseconds_per_token,
    sent_ahead,
    speedup,
)
from tandem.comparison.analysis.summary import summarize
from tandem.comparison.measuring.distributions import distribution
from tandem.comparison.measuring.json_form import encoded
from tandem.comparison.measuring.records import Failure, Record, attribute_seconds
from tandem.speculation.types import SpeculationStats
from tests.comparison.fakes import MEASUREMENT, record


def test_rounds_sent_ahead_are_added_up_and_none_where_nobody_could_send_one() -> None:
    assert sent_ahead([MEASUREMENT]) is None
    first = replace(MEASUREMENT, stale_rounds=2, stale_drafts=8, guessed_rounds=1, sent_by_depth=(3, 2, 1))
    other = replace(MEASUREMENT, sent_by_depth=(4,))
    assert sent_ahead([first, other]) == SentAhead(1, 2, 8, 14 / 10, 3)


def test_percentiles_interpolate_between_neighbours() -> None:
    assert distribution([1.0, 2.0, 3.0, 4.0]).p50 == 2.5
    assert distribution([4.0, 1.0, 3.0, 2.0]).p90 == pytest.approx(3.7)
    assert distribution([10.0, 20.0]).p25 == 12.5
    assert distribution([5.0]).p99 == 5.0


def test_a_distribution_has_llmperfs_statistics() -> None:
    found = asdict(distribution([4.0, 1.0, 3.0, 2.0]))
    assert found == pytest.approx(
        {
            "p25": 1.75,
            "p50": 2.5,
            "p75": 3.25,
            "p90": 3.7,
            "p95": 3.85,
            "p99": 3.97,
            "mean": 2.5,
            "min": 1.0,
            "max": 4.0,
            "stddev": 1.2909944487358056,
        }
    )


def test_nothing_measured_is_none_and_not_zero() -> None:
    assert set(asdict(distribution([None, None])).values()) == {None}
    assert distribution([2.0]).stddev is None


def test_acceptance_counts_over_all_requests() -> None:
    requests = completed(
        [
            record("fused", rounds=2, drafted=6, accepted=4, output_tokens=6),
            record("fused", "b", rounds=3, drafted=9, accepted=2, output_tokens=5),
        ]
    )
    found = acceptance(requests)
    assert (found.rounds, found.drafted, found.accepted) == (5, 15, 6)
    assert found.acceptance_rate == pytest.approx(6 / 15)
    assert found.mean_acceptance_length == pytest.approx(11 / 5)


def test_the_propose_rate_is_the_share_of_rounds_that_had_a_draft() -> None:
    request = record("fused", rounds=4, drafted=5, drafted_per_position=(3, 2, 0), accepted_per_position=(2, 1, 0))
    assert acceptance(completed([request])).propose_rate == pytest.approx(3 / 4)


def test_plain_decoding_has_no_acceptance_rate_and_a_mean_acceptance_length_of_one() -> None:
    plain = dict(rounds=4, drafted=0, accepted=0, output_tokens=4, accepted_per_position=(), drafted_per_position=())
    found = acceptance(completed([record("autoregressive", **plain)]))
    assert (found.acceptance_rate, found.propose_rate) == (None, 0.0)
    assert found.mean_acceptance_length == 1.0
    assert found.conditional_acceptance_by_position == ()


def test_conditional_acceptance_divides_by_the_rounds_that_got_that_far() -> None:
    requests = completed(
        [
            record("fused", accepted_per_position=(6, 3), drafted_per_position=(8, 8)),
            record("fused", "b", accepted_per_position=(2, 1, 1), drafted_per_position=(2, 2, 2)),
        ]
    )
    found = acceptance(requests)
    assert found.acceptance_by_position == (8 / 10, 4 / 10, 1 / 2)
    # At position 2 only two rounds had a draft token, though four had position 1 accepted.
    assert found.conditional_acceptance_by_position == (8 / 10, 4 / 8, 1 / 2)


def test_acceptance_names_who_proposed() -> None:
    other = dict(drafted_by={"model": 5}, accepted_by={"model": 2})
    found = acceptance(completed([record("fused"), record("fused", "b", **other)]))
    assert found.drafted_by == {"model": 8, "ngram": 1}
    assert found.accepted_by == {"model": 2, "ngram": 1}


def test_milliseconds_per_token_are_each_causes_share() -> None:
    requests = completed([record("fused"), record("fused", "b")])
    assert milliseconds_per_token(requests) == pytest.approx(
        {
            "draft": 1000 * 0.1 / 3,
            "verify": 1000 * 0.2 / 3,
            "queue": 100,
            "network": 1000 * 0.4 / 3,
            "prefill": 1000 * 0.5 / 3,
            "other": 1000 * 0.5 / 3,
        }
    )


def test_seconds_of_other_causes_are_what_remains_and_never_negative() -> None:
    stats = SpeculationStats(draft_seconds=0.25, verify_seconds=0.5, network_seconds=0.125)
    seconds, clamped = attribute_seconds(1.0, stats)
    assert (seconds.other, clamped) == (0.125, False)
    seconds, clamped = attribute_seconds(0.75, stats)
    assert (seconds.other, clamped) == (0.0, True)


def test_speedup_is_the_ratio_of_mean_tpots_over_the_pairs_that_both_completed() -> None:
    baseline = [record("plain", "a", tpot_s=0.4), record("plain", "b", tpot_s=0.2), record("plain", "c", tpot_s=9.0)]
    fused = [
        record("fused", "a", tpot_s=0.1),
        record("fused", "b", tpot_s=0.2),
        Record("fused", "code/c", "code", 0, error=Failure("UNAVAILABLE", "gone")),
        record("fused", "d", tpot_s=7.0),
    ]
    found = speedup(fused, baseline)
    assert found.speedup == pytest.approx(0.6 / 0.3)  # not the mean of 4 and 1
    assert found.pairs == 2


def test_speedup_pairs_requests_of_the_same_run() -> None:
    baseline = [record("plain", "a", 0, tpot_s=0.4), record("plain", "a", 1, tpot_s=0.6)]
    assert speedup([record("fused", "a", 1, tpot_s=0.3)], baseline).speedup == pytest.approx(2.0)


def test_speedup_leaves_out_requests_without_a_tpot() -> None:
    found = speedup([record("fused", tpot_s=None)], [record("plain", tpot_s=0.5)])
    assert (found.speedup, found.pairs) == (None, 0)


def test_end_to_end_speedup_counts_the_prompt_too() -> None:
    found = speedup([record("fused", end_to_end_latency_s=1.0)], [record("plain", end_to_end_latency_s=3.0)])
    assert found.end_to_end_speedup == pytest.approx(3.0)


def test_a_summary_uses_llmperfs_names_and_covers_every_workload() -> None:
    records = [
        record("autoregressive", "a", tpot_s=0.4),
        record("autoregressive", "p", kind="prose", tpot_s=0.3),
        record("fused", "a", tpot_s=0.1),
        record("fused", "p", kind="prose", tpot_s=0.3, output_token_ids=(1, 2, 4)),
    ]
    plain, fused = summarize(records, "autoregressive", "autoregressive")
    found = encoded(fused)
    for name in (
        "ttft_s",
        "tpot_s",
        "inter_token_latency_s",
        "end_to_end_latency_s",
        "request_output_throughput_token_per_s",
        "number_input_tokens",
        "number_output_tokens",
    ):
        assert set(found[name]) == {"p25", "p50", "p75", "p90", "p95", "p99", "mean", "min", "max", "stddev"}
    assert found["number_output_tokens"]["mean"] == 3
    assert found["speedup_vs_autoregressive"] == pytest.approx(0.7 / 0.4)
    assert found["identical_to_autoregressive"]["count"] == 1
    assert found["workloads"]["code"]["speedup_vs_autoregressive"] == pytest.approx(4.0)
    assert found["workloads"]["prose"]["speedup_vs_autoregressive"] == pytest.approx(1.0)
    assert found["workloads"]["prose"]["identical_to_autoregressive"]["count"] == 0
    assert encoded(plain)["speedup_vs_autoregressive"] == 1.0
    assert (found["bytes_up_per_token"], found["bytes_down_per_token"]) == (10, 20)


def test_without_plain_decoding_there_is_neither_speedup_nor_identity() -> None:
    (fused,) = summarize([record("fused")], None, None)
    found = encoded(fused)
    assert found["speedup_vs_autoregressive"] is None
    assert found["identical_to_autoregressive"] is None


def test_a_summary_of_nothing_but_failures_has_no_figures() -> None:
    failed = Record("fused", "code/a", "code", 0, error=Failure("UNAVAILABLE", "gone"))
    (summary,) = summarize([failed], None, None)
    found = encoded(summary)
    assert (found["requests"], found["failed"]) == (1, 1)
    assert found["acceptance_rate"] is None
    assert found["output_throughput_token_per_s"] is None
