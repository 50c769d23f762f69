"""What every implementation of drawing, agreement and the loop must obey, as checks that take the implementation.

`test_law.py` runs them on ours; `test_mutants.py` runs them on copies with a planted mistake and expects them to fail.
The reference here is independent and naive: plain Python, its own Philox, whole-vocabulary sorts.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import math
import sys
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

import tandem.speculation.draws
from tandem.speculation.drafters import NgramDrafter
from tandem.speculation.length import FixedLength
from tandem.speculation.loop import speculate
from tandem.speculation.rounds import DraftedRounds, VerifierHere
from tandem.speculation.rules import agree
from tandem.speculation.stopping import Stopping, TextStream
from tandem.speculation.types import Draft, LengthPlan, SamplingParams, SpeculationStats, Verdict

repeatable = settings(derandomize=True, database=None, deadline=None)

U64 = st.integers(0, 2**64 - 1)
PAD = 0
Tokens = tuple[int, ...]


# --- implementations and their mutated copies ---


class PlaceGone(Exception):
    """The text to change does not stand there once. No AssertionError, which a check may raise."""


@dataclass(frozen=True)
class Implementation:
    """What is on trial. `draft_offset` is by how many positions a drafter's noise is off."""

    draws: ModuleType = tandem.speculation.draws
    draft_offset: int = 0


OURS = Implementation()
_copies = itertools.count()


def mutated(module: ModuleType, old: str, new: str, *more: tuple[str, str]) -> ModuleType:
    """A copy of `module` in whose source `old`, which must stand there once (or PlaceGone), reads `new`; so `more`."""
    assert module.__file__ and module.__spec__
    with open(module.__file__, encoding="utf-8") as file:
        source = file.read()
    for before, after in ((old, new), *more):
        found = source.count(before)
        if found != 1:
            raise PlaceGone(f"{before!r} stands {found} times in {module.__name__}: adapt the mutant")
        source = source.replace(before, after)
    name = f"mutated_{module.__name__.rpartition('.')[2]}_{next(_copies)}"
    copy = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader=None))
    sys.modules[name] = copy  # dataclasses look their module up
    exec(compile(source, name, "exec"), copy.__dict__)
    return copy


# --- the naive reference ---


def philox(key: tuple[int, int], counter: int) -> list[int]:
    """Philox4x64-10 (Salmon et al. 2011) of the 256-bit `counter`: four words."""
    mask = 2**64 - 1
    k0, k1 = key
    c0, c1, c2, c3 = (counter >> (64 * i) & mask for i in range(4))
    for _ in range(10):
        p0, p1 = 0xD2E7470EE14C6C93 * c0, 0xCA5A826395121157 * c2
        c0, c1, c2, c3 = (p1 >> 64) ^ c1 ^ k0, p1 & mask, (p0 >> 64) ^ c3 ^ k1, p0 & mask
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & mask, (k1 + 0xBB67AE8584CAA73B) & mask
    return [c0, c1, c2, c3]


def reference_word(seed: int, position: int, token: int) -> int:
    """numpy counts up before it generates: block 1 comes first."""
    return philox((seed, position), 1 + token // 4)[token % 4]


def reference_noise(word: int) -> float:
    """From the uniform (n + 1/2) / 2**53, or for the upper half from its distance to 1, which a float holds exactly."""
    n = word >> 11
    if n < 2**52:
        return -math.log(-math.log((2 * n + 1) / 2**54))
    return -math.log(-math.log1p(-(2**54 - (2 * n + 1)) / 2**54))


def reference_survivors(logits: Sequence[float], params: SamplingParams) -> list[int]:
    """Temperature, top-k, top-p, min-p, on a list sorted by probability, the lower id first among equals."""
    scores = [float(x) / params.temperature for x in logits]
    ids = sorted(range(len(scores)), key=lambda v: (-scores[v], v))
    top = scores[ids[0]]
    if params.top_k:
        ids = ids[: params.top_k]
    if params.top_p < 1:
        weights = [math.exp(scores[v] - top) for v in ids]
        total = math.fsum(weights)
        keep = next((n for n in range(1, len(ids)) if math.fsum(weights[:n]) / total >= params.top_p), len(ids))
        ids = ids[:keep]
    if params.min_p:
        ids = [v for v in ids if scores[v] == top or math.exp(scores[v] - top) >= params.min_p]
    return ids


def reference_law(logits: Sequence[float], params: SamplingParams) -> np.ndarray:
    """The exact distribution of the token."""
    law = np.zeros(len(logits))
    if params.greedy:
        law[max(range(len(logits)), key=lambda v: (logits[v], -v))] = 1
        return law
    ids = reference_survivors(logits, params)
    top = max(float(logits[v]) for v in ids)
    for v in ids:
        law[v] = math.exp((float(logits[v]) - top) / params.temperature)
    return law / law.sum()


def reference_draw(logits: Sequence[float], params: SamplingParams, position: int) -> int:
    if params.greedy:
        return max(range(len(logits)), key=lambda v: (logits[v], -v))
    ids = reference_survivors(logits, params)
    return max(
        ids,
        key=lambda v: (
            float(logits[v]) / params.temperature + reference_noise(reference_word(params.seed, position, v)),
            -v,
        ),
    )


def total_variation(p: dict[Tokens, float], q: dict[Tokens, float]) -> float:
    return sum(abs(p.get(x, 0.0) - q.get(x, 0.0)) for x in p.keys() | q.keys()) / 2


def chi_square_p_value(counts: np.ndarray, law: np.ndarray) -> float:
    """Pearson's test; 0 where something impossible happened. The survival function by its exact recurrence."""
    possible = law > 0
    if counts[~possible].any():
        return 0.0
    expected = law[possible] * counts.sum()
    assert expected.min() >= 5, "too few draws for a chi-square test"
    half = float(((counts[possible] - expected) ** 2 / expected).sum()) / 2
    degrees = int(possible.sum()) - 1
    if degrees == 0 or half == 0:
        return 1.0
    a, tail = (0.5, math.erfc(math.sqrt(half))) if degrees % 2 else (1.0, math.exp(-half))
    while a < degrees / 2:
        tail += math.exp(a * math.log(half) - half - math.lgamma(a + 1))
        a += 1
    return tail


# --- a toy target, its verifier and drafters good and bad ---


class ToyModel:
    """Logits from the last `order` tokens, by tables from a fixed seed."""

    def __init__(self, vocabulary: int, seed: int, order: int = 2, spread: float = 2.0) -> None:
        tables = np.random.default_rng(seed).normal(0, spread, (order, vocabulary, vocabulary))
        self.vocabulary = vocabulary
        self._tables = tables.astype(np.float32)
        self._bias = np.random.default_rng(seed + 1).normal(0, spread, vocabulary).astype(np.float32)

    def logits(self, context: Sequence[int]) -> np.ndarray:
        total = self._bias.copy()
        for i, table in enumerate(self._tables):
            if i < len(context):
                total += table[context[-1 - i]] * np.float32(0.5**i)
        return total


class NoisyModel:
    """Like another model, but not quite."""

    def __init__(self, model: ToyModel, amount: float, seed: int = 99) -> None:
        self._model = model
        self.vocabulary = model.vocabulary
        self._noise = ToyModel(model.vocabulary, seed, order=1, spread=amount)

    def logits(self, context: Sequence[int]) -> np.ndarray:
        return self._model.logits(context) + self._noise.logits(context)


class TargetDraw:
    """The target's draws over one padded pass: row i stands after draft[:i]."""

    def __init__(self, draw: Callable, tokens: Sequence[int], draft: Sequence[int]) -> None:
        self._draw, self._tokens, self._draft = draw, tuple(tokens), tuple(draft)

    def __call__(self, i: int):
        draft = self._draft + (PAD,) * (i - len(self._draft))
        return self._draw(self._tokens + draft[:i], len(self._tokens) + i)


class Stateless:
    """A verifier or drafter whose opening and closing do nothing."""

    async def open(self, prompt: Sequence[int]) -> None: ...

    async def close(self) -> None: ...


class ToyVerifier(Stateless, VerifierHere):
    """Verifies with the implementation on trial; keeps what happened in each round."""

    def __init__(self, impl: Implementation, model) -> None:
        self._impl, self._model, self.sampling = impl, model, SamplingParams()
        self.history: list[tuple[int, Tokens, Verdict]] = []

    async def verify(self, tokens: Sequence[int], draft: Sequence[int], distributions=()) -> Verdict:
        def draw(context: Tokens, position: int):
            return self._impl.draws.draw(self._model.logits(context), self.sampling, position)

        assert len(self.history) < 20_000, "the loop does not get on"
        verdict = agree(draft, TargetDraw(draw, tokens, draft))
        self.history.append((len(tokens), tuple(draft), verdict))
        return verdict


class ModelDrafter(Stateless):
    """Drafts with a model and the same noise; `twist` changes each proposal."""

    def __init__(self, impl: Implementation, model, twist: int = 0) -> None:
        self._impl, self._model, self._twist, self.sampling = impl, model, twist, SamplingParams()

    async def propose(self, tokens: Sequence[int], plan: LengthPlan) -> Draft:
        context = list(tokens)
        for _ in range(plan.k):
            at = len(context) + self._impl.draft_offset
            drawn = self._impl.draws.draw(self._model.logits(context), self.sampling, at)
            context.append((drawn + self._twist) % self._model.vocabulary)
        return Draft(tuple(context[len(tokens) :]))


class GarbageDrafter(Stateless):
    """Drafts of any length up to k, of any tokens."""

    def __init__(self, vocabulary: int) -> None:
        self._rng = np.random.default_rng(5)
        self._vocabulary = vocabulary

    async def propose(self, tokens: Sequence[int], plan: LengthPlan) -> Draft:
        return Draft(tuple(int(t) for t in self._rng.integers(0, self._vocabulary, self._rng.integers(0, plan.k + 1))))


DRAFTERS: dict[str, Callable] = {
    "none": lambda impl, model: None,
    "n-gram": lambda impl, model: NgramDrafter(longest=3, shortest=1),
    "perfect": lambda impl, model: ModelDrafter(impl, model),
    "always wrong": lambda impl, model: ModelDrafter(impl, model, twist=1),
    "noisy model": lambda impl, model: ModelDrafter(impl, NoisyModel(model, 0.7)),
    "garbage": lambda impl, model: GarbageDrafter(model.vocabulary),
}

PROMPT = (3, 1, 4, 1)


def generate(
    impl: Implementation,
    model,
    drafter,
    params: SamplingParams,
    k: int,
    length: int,
    verifier: ToyVerifier | None = None,
) -> tuple[Tokens, SpeculationStats]:
    stats = SpeculationStats()
    verifier = verifier or ToyVerifier(impl, model)
    for one in (verifier, drafter):
        if isinstance(one, ToyVerifier | ModelDrafter):
            one.sampling = params
    rounds = DraftedRounds(verifier, drafter)
    stopping = Stopping(TextStream(), max_new_tokens=length)

    async def collect() -> Tokens:
        chunks = [c async for c in speculate(PROMPT, FixedLength(k), rounds, stopping, stats)]
        return tuple(t for c in chunks for t in c.token_ids)

    return asyncio.run(collect()), stats


# --- enumeration: every outcome of every draw, each with its exact probability ---


class Chance:
    """Walks one path of choices: a given beginning, then the first possible outcome each time."""

    def __init__(self, beginning: Sequence[int]) -> None:
        self._beginning = list(beginning)
        self._taken: list[int] = []
        self._open: list[list[int]] = []
        self.weight = 1.0

    def choose(self, law: Sequence[float]) -> int:
        assert len(self._taken) < 60, "the loop does not get on"
        left = [x for x, p in enumerate(law) if p > 0]
        at = len(self._taken)
        pick = self._beginning[at] if at < len(self._beginning) else left[0]
        self._taken.append(pick)
        self._open.append([x for x in left if x > pick])
        self.weight *= law[pick]
        return pick

    def next_path(self) -> list[int] | None:
        for at in range(len(self._taken) - 1, -1, -1):
            if self._open[at]:
                return [*self._taken[:at], self._open[at][0]]
        return None


async def enumerated(run: Callable[[Chance], Awaitable[Tokens]]) -> dict[Tokens, float]:
    """The exact law of what `run` returns."""
    law: dict[Tokens, float] = defaultdict(float)
    path: list[int] | None = []
    while path is not None:
        chance = Chance(path)
        law[await run(chance)] += chance.weight
        path = chance.next_path()
    return dict(law)


class EnumeratedTarget(Stateless, VerifierHere):
    """A target whose draw at (position, context) is a choice, made once, as seeded noise makes it."""

    def __init__(self, chance: Chance, law: Callable[[Tokens], np.ndarray]) -> None:
        self._chance, self._law = chance, law
        self._drawn: dict[Tokens, int] = {}

    def drawn(self, context: Tokens) -> int:
        if context not in self._drawn:
            self._drawn[context] = self._chance.choose(self._law(context))
        return self._drawn[context]

    async def verify(self, tokens: Sequence[int], draft: Sequence[int], distributions=()) -> Verdict:
        return agree(draft, TargetDraw(lambda context, position: self.drawn(context), tokens, draft))


# What a draft may know of the target's draw t: rows of P(draft | t), given the target's p and the draft's own q.
Coupling = Callable[[np.ndarray, np.ndarray], np.ndarray]


def _sharing_noise(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Both argmax(log-probability + the same Gumbel noise): the diagonal is exact, the rest fills the marginals."""
    with np.errstate(divide="ignore", invalid="ignore"):
        same = np.array([1 / np.nansum(np.maximum(p / p[x], q / q[x])) if p[x] * q[x] else 0.0 for x in range(len(p))])
    rest = np.outer(p - same, q - same)
    joint = np.diag(same) + (rest / rest.sum() * (1 - same.sum()) if rest.sum() > 1e-15 else 0)
    return joint / np.where(joint.sum(1, keepdims=True) > 0, joint.sum(1, keepdims=True), 1)


def _best_coupling(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    same = np.minimum(p, q)
    rest = np.outer(p - same, q - same)
    joint = np.diag(same) + (rest / rest.sum() * (1 - same.sum()) if rest.sum() > 1e-15 else 0)
    return joint / np.where(joint.sum(1, keepdims=True) > 0, joint.sum(1, keepdims=True), 1)


COUPLINGS: dict[str, Coupling] = {
    "shares the noise": _sharing_noise,
    "coupled as well as can be": _best_coupling,
    "independent": lambda p, q: np.tile(q, (len(p), 1)),
    "always right": lambda p, q: np.eye(len(p)),
    "always wrong": lambda p, q: np.roll(np.eye(len(p)), 1, axis=1),
    "always the same token": lambda p, q: np.tile(np.eye(len(p))[0], (len(p), 1)),
    "right only about token 0": lambda p, q: np.eye(len(p))[[0] + [1 + t % (len(p) - 1) for t in range(1, len(p))]],
}


class EnumeratedDrafter(Stateless):
    def __init__(
        self, chance: Chance, target: EnumeratedTarget, law: Callable, own_law: Callable, coupling: Coupling
    ) -> None:
        self._chance, self._target = chance, target
        self._law, self._own_law, self._coupling = law, own_law, coupling

    async def propose(self, tokens: Sequence[int], plan: LengthPlan) -> Draft:
        context = tuple(tokens)
        for _ in range(plan.k):
            rows = self._coupling(self._law(context), self._own_law(context))
            context += (self._chance.choose(rows[self._target.drawn(context)]),)
        return Draft(context[len(tokens) :])


def chain_law(law: Callable[[Tokens], np.ndarray], length: int, end: frozenset[int]) -> dict[Tokens, float]:
    """What the target alone generates: the product of its conditionals, ended by `end` or the length."""
    done: dict[Tokens, float] = {}
    alive: dict[Tokens, float] = {(): 1.0}
    while alive:
        grown = {(*x, t): w * p for x, w in alive.items() for t, p in enumerate(law(ENUMERATED_PROMPT + x)) if p > 0}
        done |= {x: w for x, w in grown.items() if x[-1] in end or len(x) == length}
        alive = {x: w for x, w in grown.items() if x not in done}
    return done


ENUMERATED_PROMPT = (0, 1, 2)


def enumerated_loop_law(
    law: Callable, own_law: Callable, coupling: Coupling, k: int, length: int, end: frozenset[int]
) -> dict[Tokens, float]:
    async def run(chance: Chance) -> Tokens:
        target = EnumeratedTarget(chance, law)
        drafter = EnumeratedDrafter(chance, target, law, own_law, coupling)
        stopping = Stopping(TextStream(), length, end_of_sequence_ids=end)
        rounds = DraftedRounds(target, drafter)
        chunks = speculate(ENUMERATED_PROMPT, FixedLength(k), rounds, stopping, SpeculationStats())
        return tuple([t async for c in chunks for t in c.token_ids])

    return asyncio.run(enumerated(run))


def tiny_laws() -> Iterator[tuple[str, Callable, Callable, frozenset[int]]]:
    """(name, the target's law, the draft's law, end-of-sequence ids) on three tokens."""
    target, draft = ToyModel(3, seed=1, spread=0.8), ToyModel(3, seed=7, spread=0.8)

    def under(model: ToyModel, params: SamplingParams) -> Callable[[Tokens], np.ndarray]:
        table = {(a, b): reference_law(model.logits((a, b)).tolist(), params) for a in range(3) for b in range(3)}
        return lambda context: table[context[-2:]]

    plain, cut = SamplingParams(temperature=1.0), SamplingParams(temperature=0.7, top_k=2, top_p=0.9)
    yield "plain", under(target, plain), under(draft, plain), frozenset()
    yield "plain with an end", under(target, plain), under(draft, plain), frozenset({2})
    yield "target cut, draft not", under(target, cut), under(draft, plain), frozenset()
    yield "draft cut, target not", under(target, plain), under(draft, cut), frozenset()


# --- the checks ---


def check_enumerated_law(k: int, coupling: Coupling) -> None:
    """The law of the whole loop is the target's own, whatever the draft knows."""
    for name, law, own_law, end in tiny_laws():
        got = enumerated_loop_law(law, own_law, coupling, k, 3, end)
        distance = total_variation(got, chain_law(law, 3, end))
        assert distance < 1e-12, f"{name}: total variation {distance}"


WARPINGS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=1.7),
    SamplingParams(temperature=1.0, top_k=4),
    SamplingParams(temperature=1.0, top_p=0.8),
    SamplingParams(temperature=1.0, min_p=0.15),
    SamplingParams(temperature=1.3, top_k=6, top_p=0.9, min_p=0.05),
]

LOGITS = np.array([0.5, -1.0, 2.0, 0.25, 0.5, 0.0, 1.0, -0.5, -0.5], dtype=np.float32)


def seeded(params: SamplingParams, seed: int) -> SamplingParams:
    return SamplingParams(params.temperature, params.top_k, params.top_p, params.min_p, seed)


def check_draw_law(impl: Implementation, params: SamplingParams, draws: int = 2500) -> None:
    """Chi-square of seeded draws against the exact distribution: over seeds, over positions, and of pairs."""
    law = reference_law(LOGITS.tolist(), params)
    over_seeds = [impl.draws.draw(LOGITS, seeded(params, seed), 17) for seed in range(draws)]
    over_positions = [impl.draws.draw(LOGITS, seeded(params, 17), at) for at in range(draws)]
    for drawn in (over_seeds, over_positions):
        p_value = chi_square_p_value(np.bincount(drawn, minlength=len(law)), law)
        assert p_value > 1e-4, f"p = {p_value}"
    # Neighbours are independent: the joint law of "the most likely token or not" at positions 2i and 2i + 1.
    likeliest = int(law.argmax())
    top = float(law[likeliest])
    pairs = np.array(over_positions[: draws // 2 * 2]).reshape(-1, 2) == likeliest
    joint = np.outer([1 - top, top], [1 - top, top]).ravel()
    p_value = chi_square_p_value(np.bincount(pairs[:, 0] * 2 + pairs[:, 1], minlength=4), joint)
    assert p_value > 1e-4, f"neighbouring positions are not independent, p = {p_value}"


def check_draw_laws(impl: Implementation) -> None:
    for params in WARPINGS:
        check_draw_law(impl, params, draws=1500)


def check_seeded_draws(impl: Implementation) -> None:
    """Token for token the naive reference's draw."""
    for params in WARPINGS:
        for position in range(40):
            params = seeded(params, 1000 + position)
            assert impl.draws.draw(LOGITS, params, position) == reference_draw(LOGITS, params, position)


SAMPLED = [
    SamplingParams(),
    SamplingParams(temperature=0.8, seed=11),
    SamplingParams(temperature=1.2, top_k=5, top_p=0.95, min_p=0.02, seed=2**63 + 5),
]


def check_same_output(impl: Implementation, params: SamplingParams, length: int = 20) -> None:
    """One seed, one output: that of the target alone, for every k and every drafter."""
    model = ToyModel(10, seed=4, spread=1.0)
    alone = list(PROMPT)
    for _ in range(length):
        alone.append(reference_draw(model.logits(alone).tolist(), params, len(alone)))
    expected = tuple(alone[len(PROMPT) :])
    for k in range(7):
        for name, make in DRAFTERS.items():
            got, _ = generate(impl, model, make(impl, model), params, k, length)
            assert got == expected, f"drafter {name}, k = {k}"


def check_same_outputs(impl: Implementation) -> None:
    for params in SAMPLED:
        check_same_output(impl, params)


def check_perfect_draft(impl: Implementation) -> None:
    """A draft that is the target is accepted in full, and each round brings k + 1 tokens."""
    model = ToyModel(10, seed=4)
    for params in SAMPLED:
        for k in (1, 3):
            verifier = ToyVerifier(impl, model)
            _, stats = generate(impl, model, ModelDrafter(impl, model), params, k, 24, verifier)
            assert [len(verdict.token_ids) for _, _, verdict in verifier.history] == [k + 1] * (24 // (k + 1))
            assert [verdict.accepted for _, _, verdict in verifier.history] == [k] * (24 // (k + 1))
            assert stats.rounds == 24 // (k + 1)
            assert stats.accepted == stats.drafted == stats.rounds * k


def check_wrong_draft(impl: Implementation) -> None:
    """A draft that never agrees costs nothing but itself: one token a round, none accepted."""
    model = ToyModel(10, seed=4)
    for params in SAMPLED:
        _, stats = generate(impl, model, ModelDrafter(impl, model, twist=1), params, 3, 12)
        assert (stats.rounds, stats.accepted, stats.accepted_per_position) == (12, 0, [0, 0, 0])


class Contextless:
    """The same logits everywhere, so that every verified draft token is one independent trial."""

    def __init__(self, logits: Sequence[float]) -> None:
        self._logits = np.array(logits, dtype=np.float32)
        self.vocabulary = len(logits)

    def logits(self, context: Sequence[int]) -> np.ndarray:
        return self._logits


PAIRS = [
    ([2.0, 1.0, 0.0, -1.0], [1.0, 1.5, 0.5, -2.0]),
    ([0.0, 0.0, 0.0], [3.0, 0.0, -1.0]),
    ([1.0, 0.8, 0.6, 0.4, 0.2, 0.0], [0.9, 0.9, 0.5, 0.5, 0.1, 0.1]),
]


def check_acceptance(impl: Implementation, target: Sequence[float], draft: Sequence[float], length: int = 2400) -> None:
    """Sharing noise, drafts are accepted between (1 - TV)/(1 + TV) and 1 - TV; precisely, as the formula says."""
    params = SamplingParams(temperature=1.0, seed=3)
    p, q = reference_law(target, params), reference_law(draft, params)
    distance = float(np.abs(p - q).sum() / 2)
    exact = float(sum(1 / np.maximum(p / p[x], q / q[x]).sum() for x in range(len(p))))
    assert (1 - distance) / (1 + distance) - 1e-12 <= exact <= 1 - distance + 1e-12
    model = Contextless(target)
    verifier = ToyVerifier(impl, model)
    generate(impl, model, ModelDrafter(impl, Contextless(draft)), params, 3, length, verifier)
    trials = sum(min(verdict.accepted + 1, len(drafted)) for _, drafted, verdict in verifier.history)
    rate = sum(verdict.accepted for _, _, verdict in verifier.history) / trials
    error = 4 * math.sqrt(exact * (1 - exact) / trials)
    assert (1 - distance) / (1 + distance) - error < rate < 1 - distance + error
    assert abs(rate - exact) < error


def check_acceptances(impl: Implementation) -> None:
    for target, draft in PAIRS:
        check_acceptance(impl, target, draft)


def check_pruning(impl: Implementation) -> None:
    """The draw over a large vocabulary computes little noise but finds what all of it would: token and margin."""

    @settings(repeatable, max_examples=60, phases=[Phase.generate])
    @given(
        seed=U64,
        spread=st.sampled_from([0.0, 1e-3, 1.0, 4.0, 12.0]),
        temperature=st.sampled_from([1e-3, 0.1, 0.7, 1.0, 2.5, 50.0]),
        grain=st.sampled_from([0.0, 0.125, 1.0]),
        vocabulary=st.sampled_from([1, 2, 64, 128, 129, 130, 500, 3000]),
    )
    def check(seed: int, spread: float, temperature: float, grain: float, vocabulary: int) -> None:
        draw, margin = impl.draws.draw, impl.draws.margin
        logits = np.random.default_rng(seed).normal(0, spread, vocabulary).astype(np.float32)
        if grain:
            logits = np.round(logits / np.float32(grain)) * np.float32(grain)  # as coarse as bfloat16: ties
        noisy = logits.astype(np.float64) / temperature + impl.draws.gumbel(impl.draws.words(seed, 77, vocabulary))
        order = np.argsort(-noisy, kind="stable")
        params = SamplingParams(temperature=temperature, seed=seed)
        assert draw(logits, params, 77) == order[0]
        if vocabulary == 1:
            assert margin(logits, params, 77) == math.inf
            return
        expected = (noisy[order[0]] - noisy[order[1]]) * temperature
        assert math.isclose(margin(logits, params, 77), expected, rel_tol=1e-9, abs_tol=1e-12 * temperature)
        ordered = np.argsort(-logits, kind="stable")
        assert draw(logits, SamplingParams(), 77) == ordered[0]
        assert margin(logits, SamplingParams(), 77) == float(logits[ordered[0]]) - float(logits[ordered[1]])

    check()


def near_a_threshold(logits: list[float], params: SamplingParams) -> bool:
    """Whether the sets hang on the last bits of a sum; ties of equal logits alone do not."""
    scores = [x / params.temperature for x in logits]
    top = max(scores)
    ids = sorted(range(len(scores)), key=lambda v: (-scores[v], v))[: params.top_k or None]
    weights = [math.exp(scores[v] - top) for v in ids]
    masses = [math.fsum(weights[: n + 1]) / math.fsum(weights) for n in range(len(weights))]
    return any(abs(m - params.top_p) < 1e-9 for m in masses if params.top_p < 1) or any(
        0 < abs(w - params.min_p) < 1e-9 for w in weights if w != 1
    )


def check_survivors(impl: Implementation) -> None:
    """The sets that warping leaves, and the draw among them, are the naive reference's, ties included."""

    @settings(repeatable, max_examples=250, phases=[Phase.generate])
    @given(
        logits=st.lists(
            st.integers(-24, 24).map(lambda x: x / 4) | st.floats(-20, 20, width=32), min_size=1, max_size=30
        )
        | st.lists(st.integers(-8, 8).map(lambda x: x / 4), min_size=8, max_size=30),
        temperature=st.floats(0.05, 5),
        top_k=st.integers(0, 32),
        top_p=st.just(1.0) | st.floats(0.01, 1),
        min_p=st.just(0.0) | st.floats(0, 1),
        seed=U64,
        position=st.integers(0, 2**40),
    )
    def check(logits: list[float], position: int, **fields: Any) -> None:
        params, scores = SamplingParams(**fields), np.array(logits, dtype=np.float32)
        logits = scores.tolist()
        assume(not near_a_threshold(logits, params))
        got = impl.draws.surviving(scores.astype(np.float64) / params.temperature, params)
        expected = reference_survivors(logits, params)
        assert sorted(range(len(logits)) if got is None else got.tolist()) == sorted(expected)
        assert impl.draws.draw(scores, params, position) == reference_draw(logits, params, position)

    check()


def check_noise_resolution(impl: Implementation) -> None:
    """The noise is that of a uniform of at least 52 bits."""

    @settings(repeatable, phases=[Phase.generate])
    @given(word=st.integers(2**12, 2**64 - 2**14))
    def check(word: int) -> None:
        got = float(impl.draws.gumbel(np.array([word], dtype=np.uint64))[0])
        below, above = (reference_noise(max(0, word + shift)) for shift in (-(2**12), 2**12))
        assert below - 1e-12 <= got <= above + 1e-12

    check()
