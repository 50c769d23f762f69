"""Verification by rejection (Leviathan et al. 2023; Chen et al. 2023): the most acceptance an exact rule can have.

The draft draws x from q and sends q. The verifier accepts x with probability min(1, p(x) / q(x)), p being the target's
own warped distribution; at the first rejection it draws from the residual norm(max(0, p - q)) and the round ends; after
full acceptance one more token, the bonus, is drawn from p. So every token follows p, whatever q is: 1 - TV(p, q) of
them are the draft's. That holds as long as

- x was drawn from the very q that is sent: here a truncated one (`support`), in the 32-bit weights that are sent;
- every decision has a random number of its own, which no retry re-rolls. They are seeded by (seed, position, purpose).
  A position's token is decided by a residual or as a bonus, never both, so these two might share a stream; and since
  no other decision of this rule looks at the noise of `draw`, the bonus is simply `draw`. Nothing drafted (k = 0) is
  then plain decoding, token for token. A draft that agreement's noise coupled to the target's draw would be verified
  exactly too: acceptance and residual do not know that noise;
- how many tokens are drafted depends on what was known before they were drawn, never on themselves. So tokens that the
  target does not have are taken from q beforehand, and do not end a draft as they do under agreement.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tandem.speculation.draws import BadLogits, Drawn, Floats, Ids, Purpose, draw, likeliest, probabilities, uniform
from tandem.speculation.types import SamplingParams, SparseDistribution, Verdict

# A draft's distribution is cut to its likeliest tokens, without those this much less likely than the first. Measured
# on the embedded pair's chat and prose, acceptance of (whole, cut) and tokens sent: temperature 0.5 (0.378, 0.378) and
# 7, 0.8 (0.363, 0.362) and 16, 1.0 (0.377, 0.375) and 21. At 1.5 the draft is flat, (0.276, 0.133), and no support that
# is worth sending keeps it: 256 tokens reach 0.180.
SUPPORT = 32
FLOOR = 2.0**-8

Logits = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Distribution:
    """Probabilities `p` in float64 of ascending token `ids`; every other token has none."""

    ids: Ids
    p: Floats

    def of(self, token: int) -> float:
        at = int(np.searchsorted(self.ids, token))
        return float(self.p[at]) if at < len(self.ids) and self.ids[at] == token else 0.0

    def at(self, share: float) -> int:
        """The token at `share` of the mass, in (0, 1): a draw from the distribution if `share` is uniform."""
        mass = np.cumsum(self.p)
        last = int(np.searchsorted(mass, mass[-1]))  # rounding must not reach past it, to a token without mass
        return int(self.ids[min(int(np.searchsorted(mass, share * mass[-1], side="right")), last)])


def exactly(sent: SparseDistribution) -> Distribution:
    """The distribution that was sent. fsum rounds once, so both sides divide by the same number on any machine."""
    weights = np.array(sent.weights)
    return Distribution(np.array(sent.token_ids, dtype=np.int64), weights / math.fsum(sent.weights))


def warped(logits: Logits, params: SamplingParams) -> Distribution:
    """The target's p: what plain decoding draws from. Raises BadLogits."""
    return Distribution(*probabilities(logits, params))


def support(logits: Logits, params: SamplingParams, most: int = SUPPORT) -> SparseDistribution:
    """The draft's q: its warped distribution cut to the `most` likeliest tokens above FLOOR. Raises BadLogits."""
    ids, weights = likeliest(logits, params, most)
    rounded = weights.astype(np.float32)
    kept = rounded >= FLOOR
    return SparseDistribution(tuple(ids[kept].tolist()), tuple(rounded[kept].tolist()))


def draft_token(
    logits: Logits, params: SamplingParams, position: int, known: int | None = None, most: int = SUPPORT
) -> tuple[int, SparseDistribution]:
    """The draft's token at `position` and what it was drawn from, of the `known` first ids (those the target has)."""
    try:
        sent = support(logits[:known], params, most)
    except BadLogits:
        sent = SparseDistribution((0,), (1.0,))  # a draft may be wrong about anything
    return exactly(sent).at(uniform(params.seed, position, Purpose.DRAFT)), sent


def acceptance_probability(p: float, q: float) -> float:
    """min(1, p / q) of a token that was drawn, so that q is above 0. Raises ValueError if it could not have been."""
    if q <= 0:
        raise ValueError("draft: a token was proposed that its own distribution rules out")
    return min(1.0, p / q)


def residual(p: Distribution, q: Distribution) -> Distribution:
    """norm(max(0, p - q)): what p has and the accepted drafts do not give. Where rounding leaves nothing, p = q: p."""
    left = p.p.copy()
    at = np.searchsorted(p.ids, q.ids)
    at[at == len(p.ids)] = 0
    shared = p.ids[at] == q.ids
    left[at[shared]] = np.maximum(0.0, p.p[at[shared]] - q.p[shared])
    mass = left.sum()
    return Distribution(p.ids, left / mass) if mass > 0 else p


class Chance(Protocol):
    """What decides at draft token i of a round."""

    def accept(self, i: int, probability: float) -> bool: ...

    def correct(self, i: int, distribution: Distribution) -> int: ...


@dataclass(frozen=True, slots=True)
class Seeded:
    """Chance as a function of the seed and the absolute position, `start` being that of the round's first token."""

    seed: int
    start: int

    def accept(self, i: int, probability: float) -> bool:
        return uniform(self.seed, self.start + i, Purpose.ACCEPT) < probability

    def correct(self, i: int, distribution: Distribution) -> int:
        return distribution.at(uniform(self.seed, self.start + i, Purpose.RESIDUAL))


def reject(
    draft: Sequence[int],
    drawn_from: Sequence[Distribution],
    target: Callable[[int], Distribution],
    bonus: Callable[[int], Drawn],
    chance: Chance,
) -> Verdict:
    """Commits draft tokens up to the first rejection, then its correction; or all of them, and the bonus.

    `target(i)` is p given the prefix and draft[:i], `bonus(i)` a draw from it; both are called only as far as it
    counts.
    """
    for i, (token, q) in enumerate(zip(draft, drawn_from, strict=True)):
        p = target(i)
        if not chance.accept(i, acceptance_probability(p.of(token), q.of(token))):
            return Verdict((*draft[:i], chance.correct(i, residual(p, q))), accepted=i)
    return Verdict((*draft, bonus(len(draft)).token), accepted=len(draft))


def reject_seeded(
    draft: Sequence[int],
    sent: Sequence[SparseDistribution],
    logits: Callable[[int], Logits],
    params: SamplingParams,
    start: int,
) -> Verdict:
    """The rule on the target's logits [vocabulary] after draft[:i]; `start` is the position of draft[0].

    Nothing `sent`: every token was proposed for certain. Raises BadLogits.
    """
    drawn_from = [exactly(each) for each in sent] if sent else [certain(token) for token in draft]
    return reject(
        draft,
        drawn_from,
        lambda i: warped(logits(i), params),
        lambda i: draw(logits(i), params, start + i),
        Seeded(params.seed, start),
    )


def certain(token: int) -> Distribution:
    """All mass on one token: a copied draft's q, or a greedy one's."""
    return Distribution(np.array([token]), np.ones(1))
