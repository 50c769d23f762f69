"""Rejection sampling (Leviathan et al. 2023; Chen et al. 2023): the exact rule with the highest acceptance.

The draft model draws x from q and sends q; the verifier accepts x with probability min(1, p(x) / q(x)), p being the
target's warped distribution. A rejection draws from norm(max(0, p - q)) and ends the round; full acceptance draws a
bonus from p. So every token follows p, and a share 1 - TV(p, q) comes from the draft, provided that

- x was drawn from the q that is sent: truncated (`support`), with 32-bit weights;
- each decision has its own random number, seeded by (seed, position, purpose), which a retry does not change. The bonus
  is `draw`, so k = 0 is plain decoding, token for token;
- the number of drafted tokens does not depend on the tokens: tokens unknown to the target are removed from q before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tandem.speculation.draws import BadLogits, Floats, Ids, Purpose, draw, likeliest, probabilities, uniform
from tandem.speculation.types import SamplingParams, SparseDistribution, Verdict

# A draft's distribution is cut to at most SUPPORT tokens, each at least FLOOR times as likely as the likeliest.
# Measured with the embedded pair on chat and prose: at temperature 0.5 acceptance is 0.378 without the cut and 0.378
# with it, and 7 tokens are sent; at 0.8 it is 0.363 and 0.362 with 16 tokens; at 1.0 it is 0.377 and 0.375 with 21.
# At 1.5 the draft is flat, 0.276 and 0.133, and no support of a reasonable size is enough: 256 tokens reach 0.180.
SUPPORT = 32
FLOOR = 2.0**-8

Logits = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Distribution:
    """Probabilities `p`, float64 [n], of ascending token `ids`, int64 [n]; others have probability 0."""

    ids: Ids
    p: Floats

    def of(self, token: int) -> float:
        at = int(np.searchsorted(self.ids, token))
        return float(self.p[at]) if at < len(self.ids) and self.ids[at] == token else 0.0

    def at(self, share: float) -> int:
        """Returns the token at `share` of the mass: a draw for a uniform `share`."""
        mass = np.cumsum(self.p)
        last = int(np.searchsorted(mass, mass[-1]))  # rounding must not reach past it, to a token without mass
        return int(self.ids[min(int(np.searchsorted(mass, share * mass[-1], side="right")), last)])


def exactly(sent: SparseDistribution) -> Distribution:
    """Normalizes sent weights; fsum rounds once, so both sides get the same numbers."""
    weights = np.array(sent.weights)
    return Distribution(np.array(sent.token_ids, dtype=np.int64), weights / math.fsum(sent.weights))


def warped(logits: Logits, params: SamplingParams) -> Distribution:
    return Distribution(*probabilities(logits, params))


def support(logits: Logits, params: SamplingParams, most: int = SUPPORT) -> SparseDistribution:
    """Returns the draft's q: the warped distribution, cut to `most` tokens above FLOOR. Raises BadLogits."""
    ids, weights = likeliest(logits, params, most)
    rounded = weights.astype(np.float32)
    kept = rounded >= FLOOR
    return SparseDistribution(tuple(ids[kept].tolist()), tuple(rounded[kept].tolist()))


def draft_token(
    logits: Logits, params: SamplingParams, position: int, target_vocab_size: int | None = None, most: int = SUPPORT
) -> tuple[int, SparseDistribution]:
    """Draws the draft's token below `target_vocab_size` at `position`; returns it with its q."""
    try:
        sent = support(logits[:target_vocab_size], params, most)
    except BadLogits:
        sent = SparseDistribution((0,), (1.0,))  # a draft may be wrong about anything
    return exactly(sent).at(uniform(params.seed, position, Purpose.DRAFT)), sent


def acceptance_probability(p: float, q: float) -> float:
    """Returns min(1, p / q). Raises ValueError if q is 0."""
    if q <= 0:
        raise ValueError("draft: a proposed token has probability 0 in its own distribution")
    return min(1.0, p / q)


def residual(p: Distribution, q: Distribution) -> Distribution:
    """Returns norm(max(0, p - q)), or p if rounding leaves no mass."""
    left = p.p.copy()
    at = np.searchsorted(p.ids, q.ids)
    at[at == len(p.ids)] = 0
    shared = p.ids[at] == q.ids
    left[at[shared]] = np.maximum(0.0, p.p[at[shared]] - q.p[shared])
    mass = left.sum()
    return Distribution(p.ids, left / mass) if mass > 0 else p


class Chance:
    """The random decisions at draft token i of a round, by seed and absolute position. `start`: of draft token 0."""

    def __init__(self, seed: int, start: int) -> None:
        self.seed, self.start = seed, start

    def accept(self, i: int, probability: float) -> bool:
        """Returns True with this probability."""
        return uniform(self.seed, self.start + i, Purpose.ACCEPT) < probability

    def correct(self, i: int, distribution: Distribution) -> int:
        """Draws a token from `distribution`."""
        return distribution.at(uniform(self.seed, self.start + i, Purpose.RESIDUAL))


def reject(
    draft: Sequence[int],
    drawn_from: Sequence[Distribution],
    target: Callable[[int], Distribution],
    bonus: Callable[[int], int],
    chance: Chance,
) -> Verdict:
    """Commits drafts up to the first rejection and its correction, or all and a bonus. target(i): p after draft[:i]."""
    for i, (token, q) in enumerate(zip(draft, drawn_from, strict=True)):
        p = target(i)
        if not chance.accept(i, acceptance_probability(p.of(token), q.of(token))):
            return Verdict((*draft[:i], chance.correct(i, residual(p, q))), accepted=i)
    return Verdict((*draft, bonus(len(draft))), accepted=len(draft))


def reject_seeded(
    draft: Sequence[int],
    sent: Sequence[SparseDistribution],
    logits: Callable[[int], Logits],
    params: SamplingParams,
    start: int,
) -> Verdict:
    """Applies the rule to logits(i) after draft[:i]; nothing `sent`: q is 1. Raises BadLogits."""
    drawn_from = [exactly(each) for each in sent] if sent else [certain(token) for token in draft]
    return reject(
        draft,
        drawn_from,
        lambda i: warped(logits(i), params),
        lambda i: draw(logits(i), params, start + i),
        Chance(params.seed, start),
    )


def certain(token: int) -> Distribution:
    """Returns the q of a copied or greedy token: all mass on it."""
    return Distribution(np.array([token]), np.ones(1))
