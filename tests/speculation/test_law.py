"""The output follows the target's own distribution, and is always the same for the same seed."""

from __future__ import annotations

import pytest

from tests.daily import daily
from tests.speculation import laws
from tests.speculation.laws import OURS


@pytest.mark.each_value
@pytest.mark.parametrize("coupling", laws.COUPLINGS.values(), ids=laws.COUPLINGS.keys())
@pytest.mark.parametrize("k", [0, 1, 2, 3])
def test_the_law_of_the_loop_enumerated_is_the_targets_own_whatever_the_draft_knows(k, coupling):
    laws.check_enumerated_law(k, coupling)


@pytest.mark.parametrize(
    ("draws", "params"), daily([(1000, laws.WARPINGS[6]), *((2500, params) for params in laws.WARPINGS)], 0), ids=str
)
def test_seeded_draws_follow_the_exact_warped_distribution(draws, params):
    laws.check_draw_law(OURS, params, draws)


@pytest.mark.parametrize("params", laws.SAMPLED, ids=["greedy", "sampled", "sampled and warped"])
def test_one_seed_gives_one_output_for_every_speculation_length_and_every_drafter(params):
    laws.check_same_output(OURS, params)


def test_a_perfect_draft_is_accepted_in_full():
    laws.check_perfect_draft(OURS)


def test_a_wrong_draft_is_never_accepted():
    laws.check_wrong_draft(OURS)


@pytest.mark.parametrize(("target", "draft"), daily(laws.PAIRS, 2))
def test_acceptance_lies_between_its_bounds(target, draft):
    laws.check_acceptance(OURS, target, draft)
