"""Logits processing: what it computes, that it depends on nothing but the tokens before, and what a round costs."""

from __future__ import annotations

import itertools
import pickle
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from tandem.speculation.draws import BadLogits
from tandem.speculation.processing import Logits, Mask, Processing
from tandem.speculation.rules import draft_token, verify_draft
from tandem.speculation.types import InvalidField, Request, Rule, SamplingParams, Structure, StructureKind
from tests.daily import daily

SIZE = 12
ALL = SamplingParams(
    logit_bias=((0, 3.0), (5, -100.0), (11, 0.25)),
    presence_penalty=0.75,
    frequency_penalty=-0.5,
    repetition_penalty=1.25,
)


class NoRepeats:
    """A structure: no token twice in a row, and never 7."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.advanced = 0

    def mask(self) -> Mask:
        mask = np.ones(SIZE, dtype=np.bool_)
        mask[[7, *self.tokens[-1:]]] = False
        return mask

    def allows(self, token: int) -> bool:
        return bool(self.mask()[token])

    def advance(self, token: int) -> bool:
        self.advanced += 1
        if not self.mask()[token]:
            return False
        self.tokens.append(token)
        return True

    def back(self, count: int) -> None:
        assert 0 < count <= len(self.tokens)
        del self.tokens[-count:]


def raw(seed: int, size: int = SIZE) -> Logits:
    return np.random.default_rng(seed).normal(size=size).astype(np.float32) * 3


def by_the_book(logits: Logits, sampling: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> list[float]:
    """The definitions, token by token, in 32-bit arithmetic."""
    generated, seen = Counter(output), {*prompt, *output}
    changed = []
    for token, logit in enumerate(logits):
        if token in seen and sampling.repetition_penalty != 1:
            penalty = np.float32(sampling.repetition_penalty)
            logit = logit / penalty if logit > 0 else logit * penalty
        logit -= np.float32(sampling.frequency_penalty) * np.float32(generated[token])
        logit -= np.float32(sampling.presence_penalty) * np.float32(token in generated)
        changed.append(float(logit + np.float32(dict(sampling.logit_bias).get(token, 0.0))))
    return changed


@pytest.mark.parametrize("seed", range(5))
def test_penalties_and_biases_are_those_of_the_definitions(seed: int) -> None:
    chance = random.Random(seed)
    prompt, output = [[chance.randrange(SIZE) for _ in range(n)] for n in (4, 9)]
    for sampling in (
        ALL,
        SamplingParams(presence_penalty=2),
        SamplingParams(frequency_penalty=1.5),
        SamplingParams(repetition_penalty=0.5),
        SamplingParams(logit_bias=((3, -1.0),)),
    ):
        processing, logits = Processing(sampling, len(prompt)), raw(seed)
        for split in range(len(output) + 1):
            before, draft = [*prompt, *output[:split]], output[split:]
            assert processing.after(before).logits(logits, draft).tolist() == by_the_book(
                logits, sampling, prompt, output
            )
        assert logits.tolist() == raw(seed).tolist(), "the raw logits are left alone: log-probabilities need them"


def match(output: Sequence[int]) -> bool:
    structure = NoRepeats()
    return all(structure.advance(token) for token in output)


@pytest.mark.parametrize("seed", daily(range(10), 0, 1, 2))
def test_a_token_is_kept_exactly_if_it_still_has_the_largest_logit(seed: int) -> None:
    """Whatever was asked before, of the draft or of the target, for a mask or for a token."""
    chance, prompt = random.Random(seed), [1, 2]
    processing, tokens, kept = Processing(SamplingParams(), 2, NoRepeats()), list(prompt), 0
    for _ in range(60):
        processor, draft = processing.after(tokens), [chance.randrange(SIZE) for _ in range(4)]
        for i in chance.choices(range(5), k=8):
            logits, fresh = raw(chance.randrange(99)), Processing(SamplingParams(), 2, NoRepeats()).after(tokens)
            best, changed = int(logits.argmax()), fresh.logits(logits, draft[:i])
            matches = match([*tokens[2:], *draft[:i]])
            assert processor.keeps(best, draft[:i]) == (matches and changed[best] == logits[best])
            kept += processor.keeps(best, draft[:i])
            if chance.random() < 0.2:
                assert processor.logits(logits, draft[:i]).tolist() == changed.tolist()
        tokens += [t for t in draft[: chance.randrange(4)] if match([*tokens[2:], t])][:1]
    assert kept > 20
    assert not Processing(ALL, 2, NoRepeats()).after(tokens).keeps(3, ()), "penalties may raise another"


def test_a_rank_that_gets_a_copy_changes_logits_alike_and_a_structure_is_not_sent() -> None:
    processor = Processing(ALL, 2).after([1, 2, 3, 3])
    processor.logits(raw(0), [5])
    copy = pickle.loads(pickle.dumps(processor))
    assert copy.logits(raw(0), [4]).tolist() == processor.logits(raw(0), [4]).tolist()
    with pytest.raises(TypeError, match="structure"):
        pickle.dumps(Processing(SamplingParams(), 2, NoRepeats()).after([1, 2]))


@pytest.mark.parametrize("seed", range(20))
def test_whatever_was_asked_before_the_same_tokens_give_the_same_logits(seed: int) -> None:
    """Commits, rejections, drafts that do not match, resumes at a shorter prefix, other drafts: in any order."""
    chance = random.Random(seed)
    prompt = [chance.randrange(SIZE) for _ in range(3)]
    processing, tokens = Processing(ALL, len(prompt), NoRepeats()), list(prompt)
    for _ in range(40):
        if len(tokens) > len(prompt) and chance.random() < 0.2:
            del tokens[chance.randrange(len(prompt), len(tokens)) :]
        processor, draft = processing.after(tokens), [chance.randrange(SIZE) for _ in range(5)]
        for i in chance.sample(range(6), 3) if chance.random() < 0.5 else range(chance.randrange(1, 7)):
            fresh = Processing(ALL, len(prompt), NoRepeats()).after(tokens)
            assert processor.logits(raw(i), draft[:i]).tolist() == fresh.logits(raw(i), draft[:i]).tolist()
        tokens += draft[: chance.randrange(6)]


def test_tokens_outside_the_structure_are_never_drawn_and_end_a_draft() -> None:
    sampling = SamplingParams(temperature=1.0, seed=3)
    processor = Processing(sampling, 1, NoRepeats()).after([2, 4])
    for seed in range(50):
        verdict = verify_draft([7, 1], (), lambda i: raw(0), Request(replace(sampling, seed=seed)), 2, processor)
        assert verdict.accepted == 0 and verdict.token_ids[0] not in (4, 7)
    token, _ = draft_token(raw(0), Request(sampling), 4, None, processor, [7])
    assert token == draft_token(raw(0), Request(sampling), 4)[0], "a draft beyond it is not masked"


def test_a_structure_that_became_too_complex_fails_the_targets_row_and_spoils_only_a_draft() -> None:
    class Complex(NoRepeats):
        def mask(self) -> Mask:
            raise BadLogits("structure: too complex")

    processor = Processing(SamplingParams(), 1, Complex()).after([2])
    with pytest.raises(BadLogits, match="complex"):
        verify_draft([], (), lambda i: raw(0), Request(), 1, processor)
    for rule, temperature in itertools.product(Rule, (0.0, 1.0)):
        token, _ = draft_token(raw(0), Request(SamplingParams(temperature=temperature), rule), 1, None, processor)
        assert 0 <= token < SIZE


@pytest.mark.parametrize("draws", [1500, pytest.param(4000, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("rule", Rule)
def test_under_both_rules_tokens_follow_the_changed_distribution(rule: Rule, draws: int) -> None:
    sampling, prefix, logits = replace(ALL, temperature=1.0), [2, 4, 4], raw(1)
    changed = Processing(ALL, 1, NoRepeats()).after(prefix).logits(logits, ()).astype(np.float64)
    law = np.exp(changed - changed.max())
    law /= law.sum()
    processing = Processing(sampling, 1, NoRepeats())
    found = np.zeros(SIZE)
    for seed in range(draws):
        request, processor = Request(replace(sampling, seed=seed), rule), processing.after(prefix)
        drafted, sent = draft_token(raw(2), request, 3, None, processor)
        verdict = verify_draft([drafted], (sent,) if sent else (), lambda i: logits, request, 3, processor)
        found[verdict.token_ids[0]] += 1
    assert not found[law == 0].any()
    assert np.abs(found / draws - law).max() < 4.5 * np.sqrt(0.25 / draws)


def test_log_probabilities_are_of_the_raw_logits_whatever_is_drawn() -> None:
    logits = [raw(i) for i in range(3)]
    plain = verify_draft([], (), logits.__getitem__, Request(logprobs=4), 3)
    for sampling in (SamplingParams(), replace(ALL, temperature=0.7, top_k=3, seed=9)):
        processor = Processing(sampling, 1, NoRepeats()).after([2, 4, 4])
        verdict = verify_draft([], (), logits.__getitem__, Request(sampling, logprobs=4), 3, processor)
        (said,), (token,) = verdict.logprobs, verdict.token_ids
        exact = logits[0].astype(np.float64) - np.log(np.exp(logits[0].astype(np.float64)).sum())
        assert said.logprob == pytest.approx(exact[token], abs=1e-12)
        assert said.top == plain.logprobs[0].top
        assert [t for t, _ in said.top] == np.argsort(-exact)[:4].tolist()
        assert [p for _, p in said.top] == pytest.approx(np.sort(exact)[::-1][:4], abs=1e-12)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", ""),
        ("json_schema", "{"),
        ("json_schema", "[1]"),
        ("json_schema", '"' + "a" * 65536 + '"'),
        ("json_schema", "[" * 60000),
        ("choice", "yes"),
        ("choice", "[]"),
        ("choice", '["yes", 1]'),
        ("choice", '["yes", ""]'),
        ("regex", ""),
    ],
)
def test_a_structure_that_is_none_is_refused(kind: str, text: str) -> None:
    with pytest.raises(InvalidField) as caught:
        Structure(StructureKind(kind), text)
    assert caught.value.field == "structure"
