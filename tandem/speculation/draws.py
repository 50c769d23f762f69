"""Seeded draws: every token is argmax over v of warped(logit_v) + G(seed, position, v).

G is Gumbel noise from Philox4x64-10 keyed by (seed, position) with the token as counter, so a draw depends on nothing
but the logits, the parameters and the absolute position. By the Gumbel-max theorem (Gumbel 1954; Maddison et al. 2014)
the token follows the warped distribution exactly. Warping, in this order: temperature, top-k, top-p, min-p; among equal
logits the lower id comes first, so that every set is unique.
"""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tandem.speculation.types import SamplingParams

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]
Words = NDArray[np.uint64]

_BLOCK = 64  # scores of which the largest stands for all
_HEAD = 64  # candidates whose scores are computed before the rest is pruned by a bound


class BadLogits(ArithmeticError):
    """The model's logits hold no token that can be drawn (NaN or infinite)."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A token and its margin: the distance to the runner-up in logits (temperature taken out); 0 is a tie."""

    token: int
    margin: float


class Purpose(enum.IntEnum):
    """What random numbers are for: at each (seed, position) every purpose has a stream of its own.

    TOKEN is the noise of `draw`: agreement's, plain decoding's, and that of the rejection rule's bonus token.
    """

    TOKEN = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


def words(seed: int, position: int, count: int, purpose: Purpose = Purpose.TOKEN) -> Words:
    """The first `count` 64-bit words of the stream of (seed, position, purpose); TOKEN's word v belongs to token v.

    The purpose is the highest word of the counter, which no stream counts up to: streams never meet.
    """
    return _stream(seed, position, count, purpose)


@functools.lru_cache(maxsize=32)
def _stream(seed: int, position: int, count: int, purpose: Purpose) -> Words:
    """Kept for a while: beside the target, the draft needs the same words a moment earlier."""
    key = np.array([seed, position], dtype=np.uint64)
    stream = np.random.Philox(key=key, counter=int(purpose) << 192).random_raw(count)
    stream.flags.writeable = False
    return stream


def uniform(seed: int, position: int, purpose: Purpose) -> float:
    """One number of 52 bits strictly inside (0, 1)."""
    return ((int(words(seed, position, 1, purpose)[0]) >> 12) + 0.5) * 2.0**-52


def gumbel(raw: Words) -> Floats:
    """Gumbel(0, 1) noise from uniforms of 52 bits strictly inside (0, 1)."""
    uniforms = ((raw >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return -np.log(-np.log(uniforms))


def draw(logits: NDArray[np.float32], params: SamplingParams, position: int) -> Drawn:
    """Draws the token at absolute `position` from `logits` [vocabulary]. Raises BadLogits."""
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
    """The distribution that `draw` follows, for a temperature above 0: ascending ids and their probabilities.

    Raises BadLogits.
    """
    scores = _scores(logits, params)
    survivors = surviving(scores, params)
    ids = np.arange(len(scores)) if survivors is None else np.sort(survivors)
    weights = np.exp(scores if survivors is None else scores[ids])
    return ids, weights / weights.sum()


def likeliest(logits: NDArray[np.float32], params: SamplingParams, most: int) -> tuple[Ids, Floats]:
    """The likeliest `most` of the tokens that warping leaves: ascending ids, and weights of which the largest is 1.

    Raises BadLogits.
    """
    scores = _scores(logits, params)
    ids = surviving(scores, params)
    if ids is None:
        ids = _largest(scores, min(most, len(scores)))
    elif len(ids) > most:
        ids = ids[_largest(scores[ids], most)]
    ids = np.sort(ids)
    return ids, np.exp(scores[ids])


def _scores(logits: NDArray[np.float32], params: SamplingParams) -> Floats:
    """Logits over temperature, the largest at 0. Raises BadLogits."""
    top = float(logits.max())
    if not np.isfinite(top):
        raise BadLogits("no finite largest logit")
    with np.errstate(over="ignore"):  # a tiny temperature takes all but the largest to -inf, as it should
        return (logits.astype(np.float64) - top) / params.temperature


def _greedy(logits: NDArray[np.float32]) -> Drawn:
    token = int(np.argmax(logits))
    best = float(logits[token])
    if not np.isfinite(best):
        raise BadLogits("no finite largest logit")
    if len(logits) == 1:
        return Drawn(token, float("inf"))
    runner_up = max(logits[:token].max(initial=-np.inf), logits[token + 1 :].max(initial=-np.inf))
    return Drawn(token, best - float(runner_up))


def _best(noisy: Floats, candidates: Ids, temperature: float) -> Drawn:
    winner = int(np.argmax(noisy))
    if len(noisy) == 1:
        return Drawn(int(candidates[winner]), float("inf"))
    runner_up = np.partition(noisy, -2)[-2]
    return Drawn(int(candidates[winner]), float(noisy[winner] - runner_up) * temperature)


def surviving(scores: Floats, params: SamplingParams) -> Ids | None:
    """Ids that top-k, top-p and min-p leave, or None where all tokens are left. `scores` are logits / temperature."""
    ids: Ids | None = None
    if 0 < params.top_k < len(scores):
        ids = _largest(scores, params.top_k)
    if params.top_p < 1:
        ids = _nucleus(scores, ids, params.top_p)
    if params.min_p > 0:
        pool = np.arange(len(scores)) if ids is None else ids
        ids = pool[scores[pool] >= scores.max() + np.log(params.min_p)]
    return ids


def _largest(scores: Floats, k: int) -> Ids:
    """Ids of the k largest scores, the largest first, the lower id first among equals."""
    pool = _reaching(scores, k)
    among = scores[pool]
    threshold = -np.partition(-among, k - 1)[k - 1]
    above = np.flatnonzero(among > threshold)
    level = np.flatnonzero(among == threshold)[: k - len(above)]
    ids = pool[np.concatenate([above, level])]
    return ids[np.lexsort((ids, -scores[ids]))]


def _reaching(scores: Floats, k: int) -> Ids:
    """Ascending ids of few scores among which are the k largest and all their equals.

    The k-th largest of the maxima of blocks is reached by k scores at least, so whatever is below it is not wanted: ten
    times as fast as a partition of the whole vocabulary.
    """
    blocks = len(scores) // _BLOCK
    if blocks <= k:
        return np.arange(len(scores))
    maxima = scores[: blocks * _BLOCK].reshape(blocks, _BLOCK).max(axis=1)
    return np.flatnonzero(scores >= -np.partition(-maxima, k - 1)[k - 1])


def _nucleus(scores: Floats, ids: Ids | None, top_p: float) -> Ids:
    """The shortest head of the candidates, most likely first, whose probability reaches top_p."""
    pool = scores if ids is None else scores[ids]
    top = pool.max()
    total = np.exp(pool - top).sum()
    size = 256
    while True:
        head = _largest(scores, min(size, len(scores))) if ids is None else ids
        mass = np.cumsum(np.exp(scores[head] - top)) / total
        enough = int(np.searchsorted(mass, top_p, side="left"))
        if enough < len(head):
            return head[: enough + 1]
        if len(head) == len(pool):
            return head
        size *= 8


def _possible_winners(scores: Floats, raw: Words) -> Ids:
    """Ids that can come first or second, found without computing noise for all of them.

    A token outside the head needs noise above (second best of the head - largest score outside it) to matter, which is
    a threshold on its raw word. The threshold is rounded down, so no winner is ever missed.
    """
    if len(scores) <= 2 * _HEAD:
        return np.arange(len(scores))
    head = _largest(scores, _HEAD)
    if scores[head].min() == -np.inf:
        return np.sort(head)  # every token that can be drawn is in the head
    bound = np.partition(scores[head] + gumbel(raw[head]), -2)[-2] - scores[head].min()
    threshold = np.exp(-np.exp(-bound)) - 2.0**-40
    rest = np.flatnonzero(raw >= np.uint64(max(threshold, 0.0) * 2.0**64))
    return np.union1d(head, rest)
