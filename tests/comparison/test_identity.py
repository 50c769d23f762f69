"""Where outputs part, and how close the call was."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tandem.comparison.measuring.identity import Divergence, identity
from tandem.comparison.measuring.records import Failure, Record
from tests.comparison.fakes import MEASUREMENT, record


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
