"""Runners under the rejection rule: the rows' own rule in a shared step, and vocabularies that differ."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tandem.checkpoints.locate import find
from tandem.runners.fused_step import fused_step
from tandem.runners.loading import Execution, Shape, load_runner
from tandem.runners.protocol import (
    FusedResult,
    PrefillRow,
    Proposal,
    ProposeRow,
    Runner,
)
from tandem.speculation.types import Rule, SamplingParams, Verdict
from tests.rows import fused_row, propose_row, verify_row
from tests.support import toy

PROMPT = (5, 9, 100, 7, 33, 9, 100)
SAMPLED = SamplingParams(temperature=1.5, seed=3)
GREEDY = SamplingParams()


@pytest.fixture(scope="module")
def torch_runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    folder: Path = tmp_path_factory.mktemp("llama")
    torch.manual_seed(3)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=211,
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=6,
            num_key_value_heads=2,
            max_position_embeddings=128,
            initializer_range=0.4,
        )
    ).save_pretrained(folder)
    runner = load_runner(find(str(folder)), Execution("cpu", "float32"), Shape(slots=3, max_length=100, max_draft=3))
    runner.warm_up()
    return runner


@pytest.fixture(params=["torch", "toy"])
def runner(request: pytest.FixtureRequest) -> Runner:
    return request.getfixturevalue("torch_runner") if request.param == "torch" else toy(max_draft=3)


def prefilled(runner: Runner, *slots: int) -> Runner:
    runner.prefill([PrefillRow(slot, 0, PROMPT[:-1]) for slot in slots])
    return runner


def proposing(
    slot: int, sampling: SamplingParams, rule: Rule, k: int = 3, target_vocab_size: int | None = None
) -> ProposeRow:
    return propose_row(slot, len(PROMPT) - 1, PROMPT[-2:], k, sampling, rule, target_vocab_size)


def proposed(runner: Runner, *rows: ProposeRow) -> list[Proposal]:
    found = prefilled(runner, *(row.slot for row in rows)).propose(rows)
    assert all(isinstance(each, Proposal) for each in found)
    return [replace(each, seconds=0) for each in found if isinstance(each, Proposal)]


def test_rows_of_both_rules_propose_in_one_step_what_they_propose_alone(runner: Runner) -> None:
    rows = [
        proposing(0, SAMPLED, Rule.REJECTION),
        proposing(1, SAMPLED, Rule.AGREEMENT, 2),
        proposing(2, GREEDY, Rule.REJECTION),
    ]
    together = proposed(runner, *rows)
    assert together == [proposed(runner, row)[0] for row in rows]
    assert [len(each.token_ids) for each in together] == [3, 2, 3]
    assert [len(each.distributions) for each in together] == [3, 0, 0]
    for token, sent in zip(together[0].token_ids, together[0].distributions, strict=True):
        assert token in sent.token_ids


def test_rows_of_both_rules_are_verified_in_one_step_as_they_are_alone(runner: Runner) -> None:
    (proposal,) = proposed(runner, proposing(0, SAMPLED, Rule.REJECTION))
    draft = proposal.token_ids
    position, last = len(PROMPT) - 1, PROMPT[-1]
    rows = [
        verify_row(0, position, last, draft, SAMPLED, False, Rule.REJECTION, proposal.distributions),
        verify_row(1, position, last, draft, SAMPLED, False, Rule.AGREEMENT),
        verify_row(2, position, last, draft[:2], SAMPLED, False, Rule.REJECTION),
    ]
    together = prefilled(runner, 0, 1, 2).verify(rows)
    assert together == [prefilled(runner, row.slot).verify([row])[0] for row in rows]
    assert all(isinstance(verdict, Verdict) for verdict in together)
    # Draft and target are one model here: q is p cut to its top, so p / q is that top's mass for every token.
    first = together[0]
    assert isinstance(first, Verdict) and len(first.token_ids) == first.accepted + 1


def test_a_step_of_draft_and_target_carries_the_distributions(runner: Runner) -> None:
    rows = [
        fused_row(proposing(0, SAMPLED, Rule.REJECTION)),
        fused_row(proposing(1, SAMPLED, Rule.REJECTION), copied=(100, 7)),
        fused_row(proposing(2, SAMPLED, Rule.AGREEMENT)),
    ]
    prefilled(runner, 0, 1, 2)
    results = fused_step(runner, runner, rows)
    assert all(isinstance(result, FusedResult) for result in results)
    found = [result for result in results if isinstance(result, FusedResult)]
    assert [len(result.proposal.distributions) for result in found] == [3, 0, 0]
    (alone,) = prefilled(runner, 1).verify(
        [verify_row(1, len(PROMPT) - 1, PROMPT[-1], (100, 7), SAMPLED, False, Rule.REJECTION)]
    )
    assert isinstance(alone, Verdict)
    assert found[1].verdict.token_ids == alone.token_ids


def test_a_draft_with_more_tokens_than_the_target_draws_none_of_them(runner: Runner) -> None:
    for seed in range(10):
        row = proposing(0, replace(SAMPLED, seed=seed), Rule.REJECTION, 3, target_vocab_size=60)
        (proposal,) = proposed(runner, row)
        assert len(proposal.token_ids) == 3 and max(proposal.token_ids) < 60
        assert max(sent.token_ids[-1] for sent in proposal.distributions) < 60
        assert proposal.within(60) == proposal
