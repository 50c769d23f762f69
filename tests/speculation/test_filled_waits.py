"""Rounds that fill their waits with copies are never faster than a target that does not wait, by the formula."""

from __future__ import annotations

import math

import pytest

from tandem.speculation.never_waiting_theory import RunCosts, Undrafted, tpot_never_waiting
from tandem.speculation.theory import expected_tokens

DRAFT_S, LENGTHS = 0.002, range(1, 13)


def step(tokens: int) -> float:
    """The seconds of Llama-3.1-8B's step on trn2.3xlarge, as published."""
    return 0.0256 + 0.0002 * (tokens - 1)


def filled(costs: RunCosts, acceptance: float, length: int) -> float:
    """The seconds per token if a target makes the steps that fit into the wait for a draft, and idles for the rest.

    The draft goes `length` tokens beyond those that are committed meanwhile, and counts if these were the drafter's
    choice; otherwise its round is a step without a draft.
    """
    undrafted, made = costs.undrafted, length
    for _ in range(100):  # what is drafted and the steps that fit into its time depend on each other
        wait = costs.rtt + made * costs.draft
        steps = math.floor(wait / undrafted.seconds + 1e-9)
        meanwhile = steps * undrafted.tokens
        made = math.ceil(length + meanwhile)
    hit = acceptance**meanwhile
    tokens = meanwhile + hit * expected_tokens(acceptance, length) + (1 - hit) * undrafted.tokens
    return (wait + costs.step(length + 1)) / tokens


@pytest.mark.parametrize("copies", [None, Undrafted(step(3), 1.4)])
@pytest.mark.parametrize("acceptance", [0.7, 0.8, 0.9])
@pytest.mark.parametrize("rtt_ms", [10, 20, 50, 100, 200])
def test_a_wait_that_is_filled_with_steps_serves_no_faster_than_not_waiting(
    rtt_ms: float, acceptance: float, copies: Undrafted | None
) -> None:
    costs = RunCosts(DRAFT_S, step, rtt_ms / 1000, copies)
    running = min(tpot_never_waiting(costs, acceptance, length) for length in LENGTHS)
    ratio = min(filled(costs, acceptance, length) for length in LENGTHS) / running
    assert 1.0 <= ratio < 1.31


def test_where_no_step_fits_into_the_wait_it_is_stop_and_wait() -> None:
    costs = RunCosts(DRAFT_S, step, 0.010)
    alone = (0.010 + 3 * DRAFT_S + step(4)) / expected_tokens(0.7, 3)
    assert filled(costs, 0.7, 3) == pytest.approx(alone)
