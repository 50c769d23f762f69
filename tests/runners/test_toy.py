"""The toy runner is an oracle: wrong, stale or missing cache entries show as wrong tokens."""

from __future__ import annotations

import numpy as np
import pytest

from tandem.runners.fused_step import fused_step
from tandem.runners.protocol import PrefillRow, RowFailed, VerifyRow
from tandem.speculation.types import Verdict
from tests.rows import fused_row, propose_row, verify_row
from tests.support import GREEDY, SAMPLED, oracle, toy
from tests.toy import END, ToyConfig, ToyTokenizer, toy_logits

PROMPT = (5, 6, 7, 8)


def verdict(runner, row: VerifyRow) -> Verdict:
    (result,) = runner.verify([row])
    assert isinstance(result, Verdict)
    return result


def test_logits_are_a_function_of_every_token_and_of_the_salt() -> None:
    base = toy_logits([1, 2, 3], ToyConfig())
    assert base.shape == (258,) and base.dtype == np.float32
    assert (base == toy_logits([1, 2, 3], ToyConfig())).all()
    for other in ([9, 2, 3], [1, 2], [1, 2, 4], [2, 1, 3]):
        assert (base != toy_logits(other, ToyConfig())).any()
    assert (base != toy_logits([1, 2, 3], ToyConfig(salt=1))).any()


def test_a_draft_misses_about_as_often_as_it_says() -> None:
    same = sum(
        int(toy_logits([i], ToyConfig()).argmax() == toy_logits([i], ToyConfig(miss=0.3)).argmax()) for i in range(1000)
    )
    assert 650 < same < 750


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_verify_after_prefill_says_what_the_oracle_says(sampling) -> None:
    runner, truth = toy(), oracle(PROMPT, sampling, 4)
    assert runner.prefill([PrefillRow(2, 0, PROMPT[:-1])]) == [None]
    got = verdict(runner, verify_row(2, 3, PROMPT[-1], truth[:3], sampling, margins=True))
    assert (got.token_ids, got.accepted) == (truth, 3)
    assert len(got.margins) == 4


def test_a_missing_position_fails_the_row_and_a_stale_one_gives_other_tokens() -> None:
    runner = toy()
    (failed,) = runner.verify([verify_row(0, 3, 8, (), GREEDY)])
    assert isinstance(failed, RowFailed)
    runner.prefill([PrefillRow(1, 0, (5, 99, 7))])
    assert verdict(runner, verify_row(1, 3, 8, (), GREEDY)).token_ids != oracle(PROMPT, GREEDY, 1)


def test_slots_do_not_see_each_other() -> None:
    runner, others = toy(), (50, 60, 70, 80)
    runner.prefill([PrefillRow(0, 0, PROMPT[:-1]), PrefillRow(1, 0, others[:-1])])
    first, second = runner.verify([verify_row(0, 3, 8, (), GREEDY), verify_row(1, 3, 80, (), SAMPLED)])
    assert (first.token_ids, second.token_ids) == (oracle(PROMPT, GREEDY, 1), oracle(others, SAMPLED, 1))


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_propose_chains_the_oracles_tokens(sampling) -> None:
    runner = toy()
    runner.prefill([PrefillRow(0, 0, PROMPT[:-2])])
    (proposal,) = runner.propose([propose_row(0, 3, PROMPT[-2:], 5, sampling)])
    assert proposal.token_ids == oracle(PROMPT, sampling, 5, past_the_end=True)


def test_a_fused_step_proposes_and_verifies() -> None:
    target, draft = toy(), toy(ToyConfig(salt=3))
    for runner in (target, draft):
        runner.prefill([PrefillRow(0, 0, PROMPT[:-1])])
    (result,) = fused_step(target, draft, [fused_row(propose_row(0, 3, PROMPT[-2:], 3, GREEDY))])
    assert result.proposal.token_ids == oracle(PROMPT, GREEDY, 3, ToyConfig(salt=3), past_the_end=True)
    assert result.verdict.token_ids == oracle(PROMPT, GREEDY, 1)


def test_text_is_bytes_and_special_tokens_have_none() -> None:
    tokenizer = ToyTokenizer()
    assert tokenizer.encode("aé", chat=False) == [97, 195, 169]
    stream = tokenizer.stream()
    assert [stream.push(t) for t in (97, 195, 256, END)] == ["a", "Ã", "", ""]
    assert tokenizer.end_of_sequence_ids == (END,)
