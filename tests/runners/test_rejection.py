"""Module code under the rejection rule: the rows' own rule in a shared step, and vocabularies that differ."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tandem.runners.fused_step import fused_step
from tandem.runners.protocol import FusedResult, Proposal, ProposeRow
from tandem.runners.torch.torch_runner import TorchRunner
from tandem.speculation.types import Rule, SamplingParams, Verdict
from tests.rows import fill, fused_row, propose_row, verify_row
from tests.runners.compiled import PROMPT, eager

SAMPLED, GREEDY = SamplingParams(temperature=1.5, seed=3), SamplingParams()
POSITION, LAST = len(PROMPT) - 1, PROMPT[-1]


@pytest.fixture
def runner() -> TorchRunner:
    return eager()


def prefilled(runner: TorchRunner, *slots: int) -> TorchRunner:
    for slot in slots:
        fill(runner, slot, PROMPT[:-1])
    return runner


def proposing(slot: int, sampling: SamplingParams, rule: Rule, k: int = 3, **more: Any) -> ProposeRow:
    return propose_row(slot, POSITION, PROMPT[-2:], k, sampling, rule, **more)


def proposed(runner: TorchRunner, *rows: ProposeRow) -> list[Proposal]:
    found = prefilled(runner, *(row.slot for row in rows)).propose(rows)
    assert all(isinstance(each, Proposal) for each in found)
    return [replace(each, seconds=0) for each in found if isinstance(each, Proposal)]


@pytest.mark.parametrize(
    ("other", "length"), [(proposing(1, SAMPLED, Rule.AGREEMENT, 2), 2), (proposing(1, GREEDY, Rule.REJECTION), 3)]
)
def test_rows_of_both_rules_propose_in_one_step_what_they_propose_alone(
    runner: TorchRunner, other: ProposeRow, length: int
) -> None:
    rows = [proposing(0, SAMPLED, Rule.REJECTION), other]
    together = proposed(runner, *rows)
    assert together == [proposed(runner, row)[0] for row in rows]
    assert [len(each.token_ids) for each in together] == [3, length]
    assert [len(each.distributions) for each in together] == [3, 0]
    for token, sent in zip(together[0].token_ids, together[0].distributions, strict=True):
        assert token in sent.token_ids


def test_rows_of_both_rules_are_verified_in_one_step_as_they_are_alone(runner: TorchRunner) -> None:
    (proposal,) = proposed(runner, proposing(0, SAMPLED, Rule.REJECTION))
    draft = proposal.token_ids
    rejection = verify_row(0, POSITION, LAST, draft, SAMPLED, False, Rule.REJECTION, proposal.distributions)
    for other in (
        verify_row(1, POSITION, LAST, draft, SAMPLED, False, Rule.AGREEMENT),
        verify_row(1, POSITION, LAST, draft[:2], SAMPLED, False, Rule.REJECTION),
    ):
        rows = [rejection, other]
        together = prefilled(runner, 0, 1).verify(rows)
        assert together == [prefilled(runner, row.slot).verify([row])[0] for row in rows]
        assert all(isinstance(each, Verdict) and len(each.token_ids) == each.accepted + 1 for each in together)


def test_a_step_of_draft_and_target_carries_the_distributions(runner: TorchRunner) -> None:
    rows = [
        fused_row(proposing(0, SAMPLED, Rule.REJECTION)),
        fused_row(proposing(1, SAMPLED, Rule.REJECTION), copied=(100, 7)),
    ]
    prefilled(runner, 0, 1)
    found = [result for result in fused_step(runner, runner, rows) if isinstance(result, FusedResult)]
    assert [len(result.proposal.distributions) for result in found] == [3, 0]
    (alone,) = prefilled(runner, 1).verify([verify_row(1, POSITION, LAST, (100, 7), SAMPLED, False, Rule.REJECTION)])
    assert isinstance(alone, Verdict) and found[1].verdict.token_ids == alone.token_ids


def test_a_draft_with_more_tokens_than_the_target_draws_none_of_them(runner: TorchRunner) -> None:
    for seed in range(10):
        row = proposing(0, replace(SAMPLED, seed=seed), Rule.REJECTION, target_vocab_size=60)
        (proposal,) = proposed(runner, row)
        assert len(proposal.token_ids) == 3 and max(proposal.token_ids) < 60
        assert max(sent.token_ids[-1] for sent in proposal.distributions) < 60
        assert proposal.within(60) == proposal
