"""Draws tokens with seeded noise: each token is the argmax over v of warped(logit_v) + G(seed, position, v).

G is Gumbel noise from Philox4x64-10 keyed by (seed, position) with the token as counter, so a draw depends only on the
logits, the parameters and the absolute position. By the Gumbel-max theorem (Gumbel 1954; Maddison et al. 2014) the
token follows the warped distribution exactly. Warping applies temperature, top-k, top-p and min-p in this order. Among
equal logits the lower id comes first, so the set of kept tokens is always unique.
"""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass

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
    """No token can be drawn from the model's logits: they are NaN or infinite."""


class StructureFailed(BadLogits):
    """The structure of a request cannot be followed any further. The message says why."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A token and its margin: the distance to the runner-up in logits, before temperature; 0 is a tie."""

    token: int
    margin: float


class Purpose(enum.IntEnum):
    """What random numbers are used for: at each (seed, position) every purpose has its own stream.

    TOKEN is the noise of `draw`, used by agreement, by plain decoding and for the rejection rule's bonus token.
    """

    TOKEN = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


@functools.lru_cache(maxsize=32)  # a draft model next to the target has just used the same words
def words(seed: int, position: int, count: int, purpose: Purpose = Purpose.TOKEN) -> Words:
    """Returns the first `count` words, uint64 [count], of the stream of (seed, position, purpose).

    Word v of the TOKEN stream belongs to token v. The purpose is the highest word of the counter, which no stream
    counts up to, so streams never overlap.
    """
    key = np.array([seed, position], dtype=np.uint64)
    stream = np.random.Philox(key=key, counter=int(purpose) << 192).random_raw(count)
    stream.flags.writeable = False
    return stream


def uniform(seed: int, position: int, purpose: Purpose) -> float:
    """Returns one uniform number with 52 random bits, strictly inside (0, 1)."""
    return ((int(words(seed, position, 1, purpose)[0]) >> 12) + 0.5) * 2.0**-52


def gumbel(raw: Words) -> Floats:
    """Turns words, uint64 [n], into Gumbel(0, 1) noise, float64 [n], through uniforms of 52 bits inside (0, 1)."""
    uniforms = ((raw >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return -log(-log(uniforms))


def draw(logits: NDArray[np.float32], params: SamplingParams, position: int) -> Drawn:
    """Draws the token at absolute `position` from `logits`, float32 [vocabulary]. Raises BadLogits."""
    if params.greedy:
        return _greedy(logits)
    scores = _scores(logits, params)
    raw = words(params.seed, position, len(scores))
    candidates = surviving(scores, params)
    if candidates is None:
        candidates = _possible_winners(scores, raw)
    noisy = scores[candidates] + gumbel(raw[candidates])
    return _best(noisy, candidates, params.temperature)


def probabilities(logits: NDArray[np.float32], params: SamplingParams) -> tuple[Ids, Floats]:
    """Returns the distribution that `draw` follows at a temperature above 0.

    `logits`: float32 [vocabulary]. Returns ascending ids, int64 [n], and their probabilities, float64 [n]. Raises
    BadLogits.
    """
    scores = _scores(logits, params)
    survivors = surviving(scores, params)
    ids = np.arange(len(scores)) if survivors is None else np.sort(survivors)
    weights = exp(scores if survivors is None else scores[ids])
    return ids, weights / total(weights)


def likeliest(logits: NDArray[np.float32], params: SamplingParams, most: int) -> tuple[Ids, Floats]:
    """Returns the `most` likeliest of the tokens that warping keeps.

    `logits`: float32 [vocabulary]. Returns ascending ids, int64 [n], and weights, float64 [n], the largest being 1.
    Raises BadLogits.
    """
    scores = _scores(logits, params)
    ids = surviving(scores, params)
    if ids is None:
        ids = largest(scores, min(most, len(scores)))
    elif len(ids) > most:
        ids = ids[largest(scores[ids], most)]
    ids = np.sort(ids)
    return ids, exp(scores[ids])


def _scores(logits: NDArray[np.float32], params: SamplingParams) -> Floats:
    """Returns logits / temperature, shifted so that the largest is 0. Raises BadLogits."""
    top = float(logits.max())
    if not np.isfinite(top):
        raise BadLogits("no finite largest logit")
    with np.errstate(over="ignore"):  # a tiny temperature correctly takes all but the largest to -inf
        return (logits.astype(np.float64) - top) / params.temperature


def best_token(logits: NDArray[np.float32]) -> int:
    """Returns the id of the largest of `logits`, float32 [vocabulary], the lowest among equals; -1 if it is unsound."""
    token = int(np.argmax(logits))
    return token if np.isfinite(logits[token]) else -1


def greedy_token(logits: NDArray[np.float32]) -> int:
    """Returns the token with the largest logit. Raises BadLogits if no finite logit is the largest."""
    token = best_token(logits)
    if token < 0:
        raise BadLogits("no finite largest logit")
    return token


def _greedy(logits: NDArray[np.float32]) -> Drawn:
    token = greedy_token(logits)
    best = float(logits[token])
    if len(logits) == 1:
        return Drawn(token, float("inf"))
    second = max(float(part.max()) for part in (logits[:token], logits[token + 1 :]) if len(part))
    return Drawn(token, best - second)


def _best(noisy: Floats, candidates: Ids, temperature: float) -> Drawn:
    winner = int(np.argmax(noisy))
    if len(noisy) == 1:
        return Drawn(int(candidates[winner]), float("inf"))
    best, noisy[winner] = noisy[winner], -np.inf
    return Drawn(int(candidates[winner]), float(best - noisy.max()) * temperature)


def surviving(scores: Floats, params: SamplingParams) -> Ids | None:
    """Returns the ids, int64 [n], that top-k, top-p and min-p keep, or None if they keep all.

    `scores`: logits / temperature, float64 [vocabulary].
    """
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
    """Returns the ids of the k largest scores, the largest first and the lower id first among equals."""
    pool = _reaching(scores, k)
    among = scores[pool]
    threshold = -np.partition(-among, k - 1)[k - 1]
    above = np.flatnonzero(among > threshold)
    level = np.flatnonzero(among == threshold)[: k - len(above)]
    ids = pool[np.concatenate([above, level])]
    return ids[np.lexsort((ids, -scores[ids]))]


def _reaching(scores: Scores, k: int) -> Ids:
    """Returns ascending ids of a small set of scores that contains the k largest and all their equals.

    At least k scores reach the k-th largest block maximum, so scores below that can be dropped. This is ten times as
    fast as a partition of the whole vocabulary.
    """
    blocks = len(scores) // _BLOCK
    if blocks <= k:
        return np.arange(len(scores))
    maxima = scores[: blocks * _BLOCK].reshape(blocks, _BLOCK).max(axis=1)
    return np.flatnonzero(scores >= -np.partition(-maxima, k - 1)[k - 1])


def _nucleus(scores: Floats, ids: Ids | None, top_p: float) -> Ids:
    """Returns the fewest candidates, most likely first, whose total probability reaches top_p."""
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
    """Returns the ids that can come first or second, without computing the noise of all of them.

    A token outside the head matters only if its noise exceeds (second best of the head - largest score outside it),
    which is a threshold on its raw word. The threshold is rounded down, so no winner is ever missed.
    """
    if len(scores) <= 2 * _HEAD:
        return np.arange(len(scores))
    head = largest(scores, _HEAD)
    if scores[head].min() == -np.inf:
        return np.sort(head)  # every token that can be drawn is in the head
    bound = np.partition(scores[head] + gumbel(raw[head]), -2)[-2] - scores[head].min()
    threshold = float(exp(-exp(-bound))) - 2.0**-40
    rest = np.flatnonzero(raw >= np.uint64(max(threshold, 0.0) * 2.0**64))
    return np.union1d(head, rest)
