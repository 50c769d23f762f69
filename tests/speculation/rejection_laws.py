"""What every implementation of the rejection rule must obey, as checks that take the module on trial.

`test_rejection.py` runs them on ours, `test_mutants.py` on copies with a planted mistake. Laws are
enumerated: the rule asks a `Chance`, and ours here takes every outcome in turn, with its exact probability.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import ModuleType

import numpy as np

from tandem.speculation.draws import words
from tandem.speculation.length import FixedLength
from tandem.speculation.loop import speculate
from tandem.speculation.rounds import DraftedRounds, VerifierHere
from tandem.speculation.stopping import Stopping, TextStream
from tandem.speculation.types import Draft, LengthPlan, SamplingParams, SparseDistribution, SpeculationStats, Verdict
from tests.speculation.laws import (
    ENUMERATED_PROMPT,
    PAIRS,
    WARPINGS,
    Chance,
    Stateless,
    Tokens,
    ToyModel,
    chain_law,
    chi_square_p_value,
    enumerated,
    reference_law,
    seeded,
    total_variation,
)

PLAIN = SamplingParams(temperature=1.0)


class Enumerated:
    """Chance as a branching of paths."""

    def __init__(self, chance: Chance) -> None:
        self._chance = chance

    def accept(self, i: int, probability: float) -> bool:
        return self._chance.choose([1 - probability, probability]) == 1

    def correct(self, i: int, distribution) -> int:
        return int(distribution.ids[self._chance.choose(distribution.p)])


# --- one position: p and q of every kind ---


def positions() -> Iterator[tuple[str, np.ndarray, SamplingParams, Callable[[ModuleType], SparseDistribution]]]:
    """(name, the target's logits, parameters, the draft's q)."""
    for seed in range(120):
        rng = np.random.default_rng(seed)
        size = int(rng.integers(2, 7))
        target, draft = rng.normal(0, 1.5, (2, size)).astype(np.float32)
        params = WARPINGS[seed % len(WARPINGS)]
        most = int(rng.integers(1, size + 1))
        yield f"{seed}: top {most} of {params}", target, params, _cut(draft, params, most)
        weights = rng.exponential(size=size).astype(np.float32)
        yield f"{seed}: q of its own, {params}", target, params, _own(range(size), weights)
        one = int(rng.integers(size))
        yield f"{seed}: one-hot q, {params}", target, params, _own([one], np.float32([3]))
        yield f"{seed}: p == q, {params}", target, params, _cut(target, params, size)
    target = np.array([1.0, 0.5, -3.0, -3.0, 0.2], dtype=np.float32)
    for params in (replace(PLAIN, top_k=2), replace(PLAIN, top_p=0.7), replace(PLAIN, min_p=0.4)):
        yield f"disjoint, {params}", target, params, _own([2, 3], np.float32([1, 2]))


def _cut(logits: np.ndarray, params: SamplingParams, most: int) -> Callable[[ModuleType], SparseDistribution]:
    return lambda rule: rule.support(logits, params, most)


def _own(ids: Sequence[int], weights: np.ndarray) -> Callable[[ModuleType], SparseDistribution]:
    return lambda rule: SparseDistribution(tuple(ids), tuple(weights.tolist()))


def check_law_of_one_position(rule: ModuleType) -> None:
    """Over the draft's choice, acceptance and correction: the target's own warped distribution, to rounding."""
    for name, logits, params, make in positions():
        sent = make(rule)
        exact = [weight / math.fsum(sent.weights) for weight in sent.weights]

        async def run(chance: Chance, sent=sent, exact=exact, logits=logits, params=params) -> Tokens:
            token = sent.token_ids[chance.choose(exact)]
            drawn_from = [rule.exactly(sent)]
            target = _after((token,), lambda i: rule.warped(logits, params))
            return rule.reject((token,), drawn_from, target, lambda i: -1, Enumerated(chance)).token_ids[:1]

        got = asyncio.run(enumerated(run))
        expected = {(t,): p for t, p in enumerate(reference_law(logits.tolist(), params)) if p > 0}
        distance = total_variation(got, expected)
        assert distance < 1e-12, f"{name}: total variation {distance}"


def _after(draft: Tokens, law: Callable) -> Callable:
    """The target's rows: only those that stand after drafted tokens may be asked for."""

    def target(i: int):
        assert 0 <= i < len(draft)
        return law(i)

    return target


# --- sequences: the whole loop, round after round ---


class EnumeratedVerifier(Stateless, VerifierHere):
    """Verifies with the rule on trial; the bonus is a choice too."""

    def __init__(self, rule: ModuleType, chance: Chance, model: ToyModel, params: SamplingParams) -> None:
        self._rule, self._chance, self._model, self._params = rule, chance, model, params

    async def verify(
        self, tokens: Sequence[int], draft: Sequence[int], distributions: Sequence[SparseDistribution] = ()
    ) -> Verdict:
        def logits(i: int) -> np.ndarray:
            padded = (*draft, *[0] * (i - len(draft)))
            return self._model.logits([*tokens, *padded[:i]])

        def bonus(i: int) -> int:
            return self._chance.choose(reference_law(logits(i).tolist(), self._params))

        drawn_from = [self._rule.exactly(sent) for sent in distributions]
        if not drawn_from:
            drawn_from = [self._rule.certain(token) for token in draft]
        return self._rule.reject(
            tuple(draft),
            drawn_from,
            lambda i: self._rule.warped(logits(i), self._params),
            bonus,
            Enumerated(self._chance),
        )


class EnumeratedDrafter(Stateless):
    """Draws from its cut distribution; `copies`: proposes token 1 for certain instead."""

    def __init__(
        self, rule: ModuleType, chance: Chance, model: ToyModel, params: SamplingParams, most: int, copies: bool
    ) -> None:
        self._rule, self._chance, self._model, self._params = rule, chance, model, params
        self._most, self._copies = most, copies

    async def propose(self, tokens: Sequence[int], plan: LengthPlan) -> Draft:
        if self._copies:
            return Draft((1,) * plan.k)
        context, sent = list(tokens), []
        for _ in range(plan.k):
            sent.append(self._rule.support(self._model.logits(context), self._params, self._most))
            shares = [weight / math.fsum(sent[-1].weights) for weight in sent[-1].weights]
            context.append(sent[-1].token_ids[self._chance.choose(shares)])
        return Draft(tuple(context[len(tokens) :]), distributions=tuple(sent))


def loop_law(
    rule: ModuleType, params: SamplingParams, k: int, length: int, most: int, copies: bool = False
) -> tuple[dict[Tokens, float], dict[Tokens, float]]:
    """(what the loop's output follows, what the target alone would say), on three tokens."""
    target, draft = ToyModel(3, seed=1, spread=0.8), ToyModel(3, seed=7, spread=0.8)

    async def run(chance: Chance) -> Tokens:
        verifier = EnumeratedVerifier(rule, chance, target, params)
        drafter = EnumeratedDrafter(rule, chance, draft, params, most, copies)
        stopping = Stopping(TextStream(), length)
        rounds = DraftedRounds(verifier, drafter)
        chunks = speculate(ENUMERATED_PROMPT, FixedLength(k), rounds, stopping, SpeculationStats())
        return tuple([t async for chunk in chunks for t in chunk.token_ids])

    def alone(context: Tokens) -> np.ndarray:
        return reference_law(target.logits(context).tolist(), params)

    return asyncio.run(enumerated(run)), chain_law(alone, length, frozenset())


def check_law_of_sequences(rule: ModuleType) -> None:
    """Two and three tokens over several rounds: the product of the target's conditionals."""
    for params, (k, length), most in itertools.product(
        (PLAIN, SamplingParams(temperature=0.7, top_k=2), SamplingParams(temperature=1.3, top_p=0.6)),
        ((1, 2), (1, 3), (2, 3)),
        (2, 3),
    ):
        for copies in (False, True):
            got, expected = loop_law(rule, params, k, length, most, copies)
            distance = total_variation(got, expected)
            assert distance < 1e-12, f"{params}, k = {k}, top {most}, copies {copies}: total variation {distance}"


FAR_APART = [
    ([0.0] * 6, [1.6, 0.0, 0.0, 0.0, 0.0, 0.0]),
    (np.log([0.05, 0.5, 0.35, 0.1]).tolist(), np.log([0.55, 0.4, 0.04, 0.01]).tolist()),
]


# --- the seeded path ---


def seeded_output(
    rule: ModuleType, target: ToyModel, draft: ToyModel, params: SamplingParams, k: int, length: int, most: int
) -> Tokens:
    """What rounds of seeded guesses and seeded verdicts commit."""
    tokens = list(ENUMERATED_PROMPT)
    end = len(tokens) + length
    while len(tokens) < end:
        tokens += seeded_round(rule, target, draft, params, min(k, end - len(tokens) - 1), tokens, most)
    return tuple(tokens[len(ENUMERATED_PROMPT) :])


def seeded_round(
    rule: ModuleType, target: ToyModel, draft: ToyModel, params: SamplingParams, k: int, tokens: list[int], most: int
) -> Tokens:
    context, sent = list(tokens), []
    for _ in range(k):
        token, distribution = rule.draft_token(draft.logits(context), params, len(context), None, most)
        context.append(token)
        sent.append(distribution)
    proposed = tuple(context[len(tokens) :])
    for token, distribution in zip(proposed, sent, strict=True):
        assert token in distribution.token_ids, "drawn from something else than what is sent"
    verdict = rule.reject_seeded(proposed, sent, lambda i: target.logits([*tokens, *proposed[:i]]), params, len(tokens))
    return verdict.token_ids


def check_seeded_law(rule: ModuleType, seeds: int = 2500, lowest: float = 1e-6) -> None:
    """Chi-square over seeds of three tokens, drafted two at a time from a cut distribution."""
    target, draft = ToyModel(3, seed=1, spread=1.6), ToyModel(3, seed=8, spread=1.6)
    for params in (SamplingParams(temperature=1.4), SamplingParams(temperature=2.0, top_p=0.8)):
        law = chain_law(lambda c, params=params: reference_law(target.logits(c).tolist(), params), 3, frozenset())
        counts = dict.fromkeys(law, 0)
        for seed in range(seeds):
            said = seeded_output(rule, target, draft, seeded(params, seed), 2, 3, 2)
            assert said in counts, f"{said} is impossible for the target"
            counts[said] += 1
        found, expected = _pooled(np.array(list(counts.values())), np.array(list(law.values())), seeds)
        p_value = chi_square_p_value(found, expected)
        assert p_value > lowest, f"{params}: p = {p_value}"


def check_seeded_law_of_one_position(rule: ModuleType, seeds: int = 3000, lowest: float = 1e-6) -> None:
    """Chi-square over seeds of one drafted token, where many tokens can be its correction."""
    for target, draft in FAR_APART:
        p, q = np.array(target, dtype=np.float32), np.array(draft, dtype=np.float32)
        counts = np.zeros(len(p), dtype=int)
        for seed in range(seeds):
            params = replace(PLAIN, seed=seed)
            token, sent = rule.draft_token(q, params, 5)
            counts[rule.reject_seeded((token,), (sent,), lambda i, p=p: p, params, 5).token_ids[0]] += 1
        p_value = chi_square_p_value(counts, reference_law(target, PLAIN))
        assert p_value > lowest, f"p = {p_value}"


def _pooled(counts: np.ndarray, law: np.ndarray, total: int) -> tuple[np.ndarray, np.ndarray]:
    """Rare outcomes as one, so that each cell expects enough for Pearson's test."""
    rare = law * total < 8
    if not rare.any():
        return counts, law
    if law[rare].sum() * total < 8:
        rare[np.argmin(np.where(rare, np.inf, law))] = True
    return np.append(counts[~rare], counts[rare].sum()), np.append(law[~rare], law[rare].sum())


def check_rounds_repeat(rule: ModuleType) -> None:
    """A retry guesses, accepts and corrects the same again, whatever happened between."""
    target, draft = ToyModel(6, seed=1, spread=0.8), ToyModel(6, seed=7, spread=0.8)
    for seed in range(40):
        params, tokens = SamplingParams(temperature=1.3, seed=seed), [1, 2, 3, seed % 6]
        first = seeded_round(rule, target, draft, params, 4, tokens, 4)
        seeded_round(rule, target, draft, replace(params, seed=seed + 1), 3, [*tokens, 1], 4)
        assert seeded_round(rule, target, draft, params, 4, tokens, 4) == first


def check_decisions_are_independent(rule: ModuleType, seeds: int = 4000) -> None:
    """What decides at one position: uncorrelated among each other, between neighbours, and with agreement's noise."""
    flat = np.zeros(16, dtype=np.float32)
    even = rule.warped(flat, PLAIN)
    numbers = np.empty((seeds, 8))
    for seed in range(seeds):
        params, chance = replace(PLAIN, seed=seed), rule.Chance(seed, 10)
        numbers[seed] = (
            rule.draft_token(flat, params, 10, None, 16)[0],
            chance.accept(0, 0.5),
            chance.correct(0, even),
            float(words(seed, 10, 1)[0]),
            rule.draft_token(flat, params, 11, None, 16)[0],
            chance.accept(1, 0.5),
            chance.correct(1, even),
            float(words(seed, 11, 1)[0]),
        )
    correlations = np.corrcoef(numbers.T) - np.eye(8)
    assert np.abs(correlations).max() < 5 / math.sqrt(seeds), f"correlations up to {np.abs(correlations).max():.3f}"


def check_only_tokens_of_the_target_are_proposed(rule: ModuleType) -> None:
    """A draft that ends where the target's vocabulary does would be a choice made after the draw."""
    logits = np.array([0.0, 0.5, 1.0, 5.0, 6.0], dtype=np.float32)
    for seed in range(50):
        token, sent = rule.draft_token(logits, replace(PLAIN, seed=seed), 3, 3)
        assert token < 3 and sent.token_ids == (0, 1, 2)


def acceptance_rate(rule: ModuleType, target: Sequence[float], draft: Sequence[float], seeds: int) -> float:
    accepted = 0
    p = np.array(target, dtype=np.float32)
    for seed in range(seeds):
        params = replace(PLAIN, seed=seed)
        token, sent = rule.draft_token(np.array(draft, dtype=np.float32), params, 5)
        accepted += rule.reject_seeded((token,), (sent,), lambda i: p, params, 5).accepted
    return accepted / seeds


def check_acceptance_is_the_most_there_can_be(rule: ModuleType, seeds: int = 1500) -> None:
    """1 - TV(p, q), which is above what agreement reaches with shared noise."""
    for target, draft in (*PAIRS, *FAR_APART):
        p, q = reference_law(target, PLAIN), reference_law(draft, PLAIN)
        most = float(np.minimum(p, q).sum())
        shared = float(sum(1 / np.maximum(p / p[x], q / q[x]).sum() for x in range(len(p))))
        assert shared <= most
        rate = acceptance_rate(rule, target, draft, seeds)
        assert abs(rate - most) < 4 * math.sqrt(most * (1 - most) / seeds), f"{rate} instead of {most}"
