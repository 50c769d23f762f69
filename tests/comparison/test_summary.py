"""Figures of an architecture from its records, and where outputs part."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from tandem.comparison.analysis.summary import acceptance, completed, milliseconds_per_token, speedup, summarize
from tandem.comparison.measuring.distributions import DISTRIBUTIONS, distribution
from tandem.comparison.measuring.identity import Divergence, identity
from tandem.comparison.measuring.records import Failure, Record, attribute_seconds
from tandem.speculation.types import SpeculationStats
from tests.comparison.fakes import MEASUREMENT, record


def test_a_distribution_has_llmperfs_statistics() -> None:
    statistics = dict(p25=1.75, p50=2.5, p75=3.25, p90=3.7, p95=3.85, p99=3.97, mean=2.5, min=1.0, max=4.0)
    expected = {**statistics, "stddev": 1.2909944487358056}
    assert asdict(distribution([4.0, 1.0, 3.0, 2.0])) == pytest.approx(expected)
    assert set(asdict(distribution([None, None])).values()) == {None} and distribution([2.0]).stddev is None


def test_acceptance_counts_over_all_requests_by_position_and_proposer() -> None:
    found = acceptance(
        completed(
            [
                record("fused", rounds=8, drafted=16, accepted=9, output_tokens=17, accepted_per_position=(6, 3),
                       drafted_per_position=(8, 8)),
                record("fused", "b", rounds=4, drafted=2, accepted=2, output_tokens=6, accepted_per_position=(1, 1),
                       drafted_per_position=(1, 1), drafted_by={"model": 5}, accepted_by={"model": 2}),
            ]
        )
    )  # fmt: skip
    assert (found.rounds, found.drafted, found.accepted) == (12, 18, 11)
    assert (found.rate, found.mean_length, found.proposing) == pytest.approx((11 / 18, 23 / 12, 9 / 12))
    assert (found.drafted_by, found.accepted_by) == ({"model": 8, "ngram": 1}, {"model": 2, "ngram": 1})


def test_causes_add_up_to_the_whole_time_also_where_they_overlap() -> None:
    of = record("pipelined", end_to_end_latency_s=1.0)  # its causes are 2 seconds
    assert sum(value or 0.0 for value in milliseconds_per_token(completed([of])).values()) == pytest.approx(1000 / 3)
    stats = SpeculationStats(draft_seconds=0.25, verify_seconds=0.5, network_seconds=0.125)
    assert attribute_seconds(1.0, stats)[0].other == 0.125 and attribute_seconds(0.75, stats)[1]


def test_speedup_is_the_ratio_of_mean_tpots_over_the_pairs_that_both_completed() -> None:
    baseline = [record("plain", "a", tpot_s=0.4), record("plain", "b", tpot_s=0.2), record("plain", "c", tpot_s=9.0)]
    fused = [
        record("fused", "a", tpot_s=0.1),
        record("fused", "b", tpot_s=0.2),
        Record("fused", "code/c", "code", 0, error=Failure("UNAVAILABLE", "gone")),
        record("fused", "d", tpot_s=7.0),
        record("fused", "a", 1, tpot_s=5.0),
    ]
    found = speedup(fused, baseline, "plain")
    assert found.ratio == pytest.approx(0.6 / 0.3)  # not the mean of 4 and 1
    assert speedup([record("fused", tpot_s=None)], baseline, "plain").ratio is None


def test_a_summary_has_llmperfs_names_and_every_workload() -> None:
    plain = [record("autoregressive", "a", tpot_s=0.4), record("autoregressive", "p", kind="prose", tpot_s=0.3)]
    fused = [
        record("fused", "a", tpot_s=0.1),
        record("fused", "p", kind="prose", tpot_s=0.3, output_token_ids=(1, 2, 4)),
    ]
    found = summarize("fused", [*plain, *fused], "autoregressive", plain)
    assert tuple(found.distributions) == DISTRIBUTIONS and found.distributions["number_output_tokens"].mean == 3
    assert found.speedup.ratio == pytest.approx(0.7 / 0.4)
    assert found.identical is not None and (found.identical.count, found.identical.total) == (1, 2)
    assert found.workloads["code"].speedup.ratio == pytest.approx(4.0)
    assert (found.bytes_up_per_token, found.bytes_down_per_token) == (10, 20)


@pytest.mark.parametrize(("traced", "gap"), [((1, 2, 3), 0.125), ((1, 7, 3), None)])
def test_a_divergence_names_both_tokens_and_the_logit_gap_of_the_same_tokens(
    traced: tuple[int, ...], gap: float | None
) -> None:
    plain = [record("autoregressive", output_token_ids=(1, 2, 3))]
    trace = replace(MEASUREMENT, output_token_ids=traced, margins=(4.0, 0.125, 6.0))
    found = identity([record("fused", output_token_ids=(1, 9, 3))], plain, {"code/a": trace})
    assert (found.count, found.total) == (0, 1)
    assert found.divergences == (Divergence("code/a", 0, 1, autoregressive_token=2, token=9, logit_gap=gap),)


def test_the_token_of_a_sequence_that_had_ended_is_none() -> None:
    plain = [record("autoregressive", output_token_ids=(1, 2, 3))]
    (longer,) = identity([record("fused", output_token_ids=(1, 2, 3, 4))], plain).divergences
    assert (longer.position, longer.autoregressive_token, longer.token) == (3, None, 4)
    (shorter,) = identity([record("fused", output_token_ids=(1, 2))], plain).divergences
    assert (shorter.position, shorter.autoregressive_token, shorter.token) == (2, 3, None)


def test_only_pairs_that_both_completed_are_counted() -> None:
    failed = Record("autoregressive", "code/b", "code", 0, error=Failure("UNAVAILABLE", "gone"))
    found = identity([record("fused", "a"), record("fused", "b")], [record("autoregressive", "a"), failed])
    assert (found.count, found.total) == (1, 1)
