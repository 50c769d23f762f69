"""Branches of drafts: where they pay, what they save in virtual time, and that no token depends on them."""

from __future__ import annotations

import itertools

import pytest

from tandem.speculation.branches import Choices, Costs, saved_steps, where_to_branch
from tandem.speculation.types import SecondChoice
from tests.speculation.run_simulated import Ran, RunningTarget, generate
from tests.speculation.simulated import SimulatedDraft, said
from tests.speculation.virtual_time import in_virtual_time

BIG = Costs(draft=0.001, step=0.055, late=1, rate=0.7, width=5)
CLOSE, FAR = SecondChoice(7, 0.1), SecondChoice(8, 5.0)


def test_a_branch_is_worth_what_reaches_beyond_the_tokens_that_the_target_commits_meanwhile() -> None:
    assert saved_steps(0, 1, BIG) == 0.0
    assert 0 < saved_steps(0, 3, BIG) < saved_steps(1, 3, BIG) == saved_steps(9, 3, BIG)
    assert saved_steps(0, 3, Costs(0.001, 0.055, 3, 0.7, 5)) == 0.0
    # Of 2 tokens, 0.7 + 0.49 are expected to be right; a step that verifies them commits 1 + 0.7 + 0.49.
    assert saved_steps(5, 2, BIG) == pytest.approx(1.19 * (1 - 1 / 2.19))


def test_it_branches_where_a_rejection_is_likeliest_and_the_target_likely_comes_by() -> None:
    assert where_to_branch([FAR, CLOSE, FAR, FAR], [], Choices(), 5, BIG) == 1
    assert where_to_branch([FAR, CLOSE, FAR, CLOSE], [1], Choices(), 5, BIG) == 3
    assert where_to_branch([CLOSE] * 6, [], Choices(), 5, Costs(0.001, 0.055, 1, 0.7, 5)) in (0, 1)
    assert where_to_branch([None] * 4, [], Choices(), 5, BIG) is None
    assert where_to_branch([FAR, CLOSE], [], Choices(), 5, Costs(0.05, 0.055, 1, 0.7, 5)) is None


def test_what_second_choices_are_worth_is_learned() -> None:
    choices = Choices()
    for _ in range(200):
        choices.observe(CLOSE, first=True, second=False)
        choices.observe(FAR, first=False, second=True)
    assert choices.chances(0.1)[0] > 0.95 and choices.chances(0.1)[1] < 0.02
    assert choices.chances(float("inf"))[1] > 0.9
    assert where_to_branch([CLOSE, FAR], [], choices, 5, BIG) == 1


def run(acceptance: float, rtt: float, branches: bool, verify: float = 0.055, second: float = 0.4) -> Ran:
    target = RunningTarget(rtt=rtt, verify_seconds=verify, jitter=0.01 * rtt)
    draft = SimulatedDraft(acceptance, 0.0012, second=second)
    return in_virtual_time(generate(target, draft, 250, branches=branches))


def test_branches_save_steps_where_steps_are_long_and_no_token_depends_on_them() -> None:
    ratios = []
    for acceptance, rtt in itertools.product((0.7, 0.85), (0.02, 0.05)):
        with_branches, without = run(acceptance, rtt, True), run(acceptance, rtt, False)
        assert with_branches.tokens == without.tokens == said(250)
        assert with_branches.draft.tokens > without.draft.tokens
        ratios.append(with_branches.tpot / without.tpot)
    assert sum(ratios) / len(ratios) < 0.97
    assert max(ratios) < 1.03


def test_where_branches_cannot_pay_none_is_drafted() -> None:
    assert run(0.5, 0.1, True, verify=0.003).draft.tokens == run(0.5, 0.1, False, verify=0.003).draft.tokens
    assert run(1.0, 0.02, True, second=0.0).tokens == said(250)
