"""Seeded draws: a token is the argmax over v of warped(logit_v) + G(seed, position, v).

G is Gumbel noise of Philox4x64-10 keyed by (seed, position), with the token as counter: a draw depends only on logits,
parameters and absolute position, and follows the warped distribution exactly (Gumbel 1954; Maddison et al. 2014).
Warping is temperature, top-k, top-p, min-p, in this order; of equal logits the lower id comes first.
"""

from __future__ import annotations

import enum
import functools

import numpy as np
from numpy.typing import NDArray

from tandem.speculation.elementary import exp, log, total
from tandem.speculation.types import SamplingParams

Floats = NDArray[np.float64]
Scores = NDArray[np.float64] | NDArray[np.float32]
Ids = NDArray[np.int64]
Words = NDArray[np.uint64]

_BLOCK = 64  # scores per block in the search for the largest k
_HEAD = 64  # candidates whose noise is computed before the rest is pruned by a bound


class BadLogits(ArithmeticError):
    """The logits are NaN or infinite: no token can be drawn."""


class StructureFailed(BadLogits):
    """A request's structure cannot be followed further; the message is the reason."""


class Purpose(enum.IntEnum):
    """Streams of random numbers, independent at each (seed, position)."""

    TOKEN = 0  # `draw`: agreement, plain decoding, and the rejection rule's bonus
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


@functools.lru_cache(maxsize=32)  # a draft model next to the target has just used the same words
def words(seed: int, position: int, count: int, purpose: Purpose = Purpose.TOKEN) -> Words:
    """Returns the first `count` words of a stream, uint64 [count]; word v of TOKEN belongs to token v."""
    key = np.array([seed, position], dtype=np.uint64)
    stream = np.random.Philox(key=key, counter=int(purpose) << 192).random_raw(count)
    stream.flags.writeable = False
    return stream


def uniform(seed: int, position: int, purpose: Purpose) -> float:
    """Returns a uniform number of 52 random bits in (0, 1)."""
    return ((int(words(seed, position, 1, purpose)[0]) >> 12) + 0.5) * 2.0**-52


def gumbel(raw: Words) -> Floats:
    """Turns words, uint64 [n], into Gumbel(0, 1) noise, float64 [n]."""
    uniforms = ((raw >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return -log(-log(uniforms))


def draw(logits: NDArray[np.float32], params: SamplingParams, position: int) -> int:
    """Draws the token at absolute `position` from logits, float32 [vocabulary]. Raises BadLogits."""
    if params.greedy:
        return greedy_token(logits)
    candidates, noisy = _contenders(logits, params, position)
    return int(candidates[np.argmax(noisy)])


def margin(logits: NDArray[np.float32], params: SamplingParams, position: int) -> float:
    """Returns how far `draw`'s token leads the runner-up, in logits before temperature; 0 is a tie."""
    noisy = logits if params.greedy else _contenders(logits, params, position)[1]
    if len(noisy) == 1:
        return float("inf")
    second, best = np.partition(noisy, -2)[-2:]
    return (float(best) - float(second)) * (1.0 if params.greedy else params.temperature)


def _contenders(logits: NDArray[np.float32], params: SamplingParams, position: int) -> tuple[Ids, Floats]:
    """Returns ids that include the two best, and their noisy scores."""
    scores = _scores(logits, params)
    raw = words(params.seed, position, len(scores))
    candidates = surviving(scores, params)
    if candidates is None:
        candidates = _possible_winners(scores, raw)
    return candidates, scores[candidates] + gumbel(raw[candidates])


def probabilities(logits: NDArray[np.float32], params: SamplingParams) -> tuple[Ids, Floats]:
    """Returns the distribution of `draw` at temperature > 0: ascending ids, probabilities [n]. Raises BadLogits."""
    scores = _scores(logits, params)
    survivors = surviving(scores, params)
    ids = np.arange(len(scores)) if survivors is None else np.sort(survivors)
    weights = exp(scores if survivors is None else scores[ids])
    return ids, weights / total(weights)


def likeliest(logits: NDArray[np.float32], params: SamplingParams, most: int) -> tuple[Ids, Floats]:
    """Returns the `most` likeliest warped tokens: ascending ids, weights [n], the largest 1. Raises BadLogits."""
    scores = _scores(logits, params)
    ids = surviving(scores, params)
    if ids is None:
        ids = largest(scores, min(most, len(scores)))
    elif len(ids) > most:
        ids = ids[largest(scores[ids], most)]
    ids = np.sort(ids)
    return ids, exp(scores[ids])


def _scores(logits: NDArray[np.float32], params: SamplingParams) -> Floats:
    """Returns logits / temperature, shifted to a largest of 0. Raises BadLogits."""
    top = float(logits.max())
    if not np.isfinite(top):
        raise BadLogits("no finite largest logit")
    with np.errstate(over="ignore"):  # a tiny temperature correctly takes all but the largest to -inf
        return (logits.astype(np.float64) - top) / params.temperature


def best_token(logits: NDArray[np.float32]) -> int:
    """Returns the id of the largest logit, the lowest among equals; -1 if not finite."""
    token = int(np.argmax(logits))
    return token if np.isfinite(logits[token]) else -1


def greedy_token(logits: NDArray[np.float32]) -> int:
    """Returns the token with the largest logit. Raises BadLogits."""
    token = best_token(logits)
    if token < 0:
        raise BadLogits("no finite largest logit")
    return token


def surviving(scores: Floats, params: SamplingParams) -> Ids | None:
    """Returns the ids that top-k, top-p and min-p keep, or None for all. `scores`: logits / temperature."""
    ids: Ids | None = None
    if 0 < params.top_k < len(scores):
        ids = largest(scores, params.top_k)
    if params.top_p < 1:
        ids = _nucleus(scores, ids, params.top_p)
    if params.min_p > 0:
        pool = np.arange(len(scores)) if ids is None else ids
        ids = pool[scores[pool] >= scores.max() + log(params.min_p)]
    return ids


def largest(scores: Scores, k: int) -> Ids:
    """Returns the ids of the k largest scores, in descending order, the lower id first among equals."""
    pool = _reaching(scores, k)
    among = scores[pool]
    threshold = -np.partition(-among, k - 1)[k - 1]
    above = np.flatnonzero(among > threshold)
    level = np.flatnonzero(among == threshold)[: k - len(above)]
    ids = pool[np.concatenate([above, level])]
    return ids[np.lexsort((ids, -scores[ids]))]


def _reaching(scores: Scores, k: int) -> Ids:
    # At least k scores reach the k-th largest block maximum: ten times as fast as a partition of the vocabulary.
    blocks = len(scores) // _BLOCK
    if blocks <= k:
        return np.arange(len(scores))
    maxima = scores[: blocks * _BLOCK].reshape(blocks, _BLOCK).max(axis=1)
    return np.flatnonzero(scores >= -np.partition(-maxima, k - 1)[k - 1])


def _nucleus(scores: Floats, ids: Ids | None, top_p: float) -> Ids:
    """Returns the fewest candidates, likeliest first, whose total probability reaches top_p."""
    pool = scores if ids is None else scores[ids]
    top = pool.max()
    whole = total(exp(pool - top))
    size = 256
    while True:
        head = largest(scores, min(size, len(scores))) if ids is None else ids
        mass = np.cumsum(exp(scores[head] - top)) / whole
        enough = int(np.searchsorted(mass, top_p, side="left"))
        if enough < len(head):
            return head[: enough + 1]
        if len(head) == len(pool):
            return head
        size *= 8


def _possible_winners(scores: Floats, raw: Words) -> Ids:
    # Outside the head a token needs noise above (second best of the head - largest score outside): a threshold on its
    # raw word, rounded down.
    if len(scores) <= 2 * _HEAD:
        return np.arange(len(scores))
    head = largest(scores, _HEAD)
    if scores[head].min() == -np.inf:
        return np.sort(head)  # every token that can be drawn is in the head
    bound = np.partition(scores[head] + gumbel(raw[head]), -2)[-2] - scores[head].min()
    threshold = float(exp(-exp(-bound))) - 2.0**-40
    rest = np.flatnonzero(raw >= np.uint64(max(threshold, 0.0) * 2.0**64))
    return np.union1d(head, rest)
