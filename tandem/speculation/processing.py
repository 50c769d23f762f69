"""Logits processing: penalties, bias and structure, a function of the request and of the tokens before the position."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tandem.speculation.sampling import SamplingParams
from tandem.speculation.types import common

Logits = NDArray[np.float32]
Mask = NDArray[np.bool_]


class Matcher(Protocol):
    """Follows the output through a structure. `mask`, `allows` and `advance` raise StructureFailed."""

    def mask(self) -> Mask:
        """Returns which tokens may come next, bool [vocabulary] or shorter."""

    def allows(self, token: int) -> bool:
        """Returns mask[token], without the whole mask."""

    def advance(self, token: int) -> bool:
        """Takes a matching token; returns whether it matches."""

    def back(self, count: int) -> None:
        """Takes back the last `count` tokens."""


class Processing:
    """The logits processing of one sequence; `after` is thread-safe. `output`: the tokens that `matcher` has taken."""

    def __init__(
        self, sampling: SamplingParams, prompt_length: int, matcher: Matcher | None = None, output: Sequence[int] = ()
    ) -> None:
        self._sampling, self._prompt_length = sampling, prompt_length
        self._seen = TokenCounts() if sampling.repetition_penalty != 1 else None
        self._generated = TokenCounts() if sampling.presence_penalty or sampling.frequency_penalty else None
        self._structure = None if matcher is None else StructureMasks(matcher, output)
        self._bias_ids = np.array([token for token, _ in sampling.logit_bias], dtype=np.int64)
        self._biases = np.array([bias for _, bias in sampling.logit_bias], dtype=np.float32)
        self._changes = any(name != "structure" for name in sampling.processed)
        self._followed: list[int] = []  # tokens that are counted
        self._changed = np.empty(0, dtype=np.float32)
        self._last: tuple[int, ...] = ()

    def __reduce__(self) -> tuple[type[Processing], tuple[SamplingParams, int]]:
        """Copies follow the tokens by themselves; a matcher cannot be sent."""
        if self._structure:
            raise TypeError("a structure's matcher cannot be sent to another process")
        return Processing, (self._sampling, self._prompt_length)

    def after(self, tokens: Sequence[int]) -> Processor:
        """Returns the processor of a round that extends `tokens`."""
        return Processor(self, tuple(tokens))

    def logits(self, raw: Logits, tokens: tuple[int, ...], draft: Sequence[int]) -> Logits:
        """Returns changed logits, float32 [vocabulary], after `tokens` and `draft`, valid until the next call."""
        if self._changed.shape != raw.shape:
            self._changed = np.empty_like(raw)
        logits = self._changed
        np.copyto(logits, raw)
        if self._seen or self._generated:
            self._follow(tokens, draft)
            self._penalize(logits)
        if len(self._bias_ids):
            known = int(np.searchsorted(self._bias_ids, len(logits)))
            logits[self._bias_ids[:known]] += self._biases[:known]
        if self._structure:
            mask = self._structure.mask(tokens[self._prompt_length :], draft)
            if mask is not None:
                _apply(mask, logits)
        return logits

    def keeps(self, token: int, tokens: tuple[int, ...], draft: Sequence[int]) -> bool:
        """Returns whether `token`, if best before processing, stays best; False if unknown."""
        if self._structure is None or self._changes:
            return False
        # A structure only lowers logits; this is far cheaper than a mask.
        return self._structure.allows(tokens[self._prompt_length :], draft, token)

    def mask(self, tokens: tuple[int, ...], draft: Sequence[int]) -> Mask | None:
        """Returns which tokens may follow, bool [vocabulary], if nothing else changes logits; else None."""
        if self._structure is None or self._changes:
            return None
        return self._structure.mask(tokens[self._prompt_length :], draft)

    def _penalize(self, logits: Logits) -> None:
        params = self._sampling
        if self._seen:
            ids, _ = self._seen.below(len(logits))
            penalty, were = np.float32(params.repetition_penalty), logits[ids]
            logits[ids] = np.where(were > 0, were / penalty, were * penalty)
        if self._generated:
            ids, counts = self._generated.below(len(logits))
            logits[ids] -= np.float32(params.frequency_penalty) * counts
            logits[ids] -= np.float32(params.presence_penalty)

    def _follow(self, tokens: tuple[int, ...], draft: Sequence[int]) -> None:
        if tokens is not self._last:  # the next row of the same round extends the same tokens
            self._count(common(self._followed, tokens), tokens)
            self._last = tokens
        start = len(tokens)
        self._count(start + common(self._followed[start:], draft), draft, start)

    def _count(self, kept: int, tokens: Sequence[int], start: int = 0) -> None:
        """Keeps the first `kept` tokens, then adds the rest of `tokens`, which begin at position `start`."""
        while len(self._followed) > kept:
            token = self._followed.pop()
            for counts in self._counting(len(self._followed)):
                counts.remove(token)
        for token in tokens[kept - start :]:
            for counts in self._counting(len(self._followed)):
                counts.add(token)
            self._followed.append(token)

    def _counting(self, position: int) -> Iterator[TokenCounts]:
        if self._seen:
            yield self._seen
        if self._generated and position >= self._prompt_length:
            yield self._generated


@dataclass(frozen=True, slots=True)
class Processor:
    """The processing of one round, which extends `tokens`. Raises BadLogits."""

    processing: Processing
    tokens: tuple[int, ...]

    def logits(self, raw: Logits, draft: Sequence[int]) -> Logits:
        return self.processing.logits(raw, self.tokens, draft)

    def keeps(self, token: int, draft: Sequence[int]) -> bool:
        return self.processing.keeps(token, self.tokens, draft)

    def mask(self, draft: Sequence[int]) -> Mask | None:
        return self.processing.mask(self.tokens, draft)


class TokenCounts:
    """Occurrences by token; the last one added is the first removed."""

    def __init__(self) -> None:
        self._place: dict[int, int] = {}
        self._ids = np.empty(64, dtype=np.int64)  # in order of first addition
        self._counts = np.zeros(64, dtype=np.float32)

    def add(self, token: int) -> None:
        at = self._place.setdefault(token, len(self._place))
        if at == len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[at] = token
        self._counts[at] += 1

    def remove(self, token: int) -> None:
        at = self._place[token]
        self._counts[at] -= 1
        if not self._counts[at]:
            del self._place[token]

    def below(self, vocab_size: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Returns the counted ids below `vocab_size`, int64 [n], and their counts, float32 [n]."""
        ids, counts = self._ids[: len(self._place)], self._counts[: len(self._place)]
        if not len(ids) or ids.max() < vocab_size:
            return ids, counts
        known = ids < vocab_size
        return ids[known], counts[known]


class StructureMasks:
    """A structure's masks along an output and its last draft, which draft model and target both need."""

    def __init__(self, matcher: Matcher, output: Sequence[int] = ()) -> None:
        self._matcher = matcher
        self._followed = list(output)
        self._taken = len(output)  # tokens that the matcher took: all, or those before the first that does not match
        self._masks: dict[int, Mask] = {}  # by the number of followed tokens before it
        self._allowed: dict[int, int] = {}  # likewise, a token of the mask
        self._output: tuple[int, ...] = ()

    def allows(self, output: tuple[int, ...], draft: Sequence[int], token: int) -> bool:
        """Returns whether `token` may follow; False if output or draft do not match."""
        end = self._reach(output, draft)
        if end in self._masks:
            return token < len(self._masks[end]) and bool(self._masks[end][token])
        if self._allowed.get(end) != token:
            self._follow(end, (*output, *draft))
            if self._taken < end or not self._matcher.allows(token):
                return False
            self._allowed[end] = token
        return True

    def mask(self, output: tuple[int, ...], draft: Sequence[int]) -> Mask | None:
        """Returns which tokens may follow, bool [vocabulary]; None if output or draft do not match."""
        end = self._reach(output, draft)
        if end not in self._masks:
            self._follow(end, (*output, *draft))
            if self._taken < end:
                return None
            self._masks[end] = self._matcher.mask()
        return self._masks[end]

    def _reach(self, output: tuple[int, ...], draft: Sequence[int]) -> int:
        """Follows `output` and `draft` unless followed already; returns their length."""
        if output != self._output:
            self._forget(lambda at: at < len(output))
            kept = common(self._followed, output)
            if kept < len(output):
                self._follow(kept, output)
            self._output = output
        end = len(output) + len(draft)
        kept = len(output) + common(self._followed[len(output) :], draft)
        if kept < end:
            self._follow(kept, (*output, *draft))
        return end

    def _follow(self, kept: int, tokens: Sequence[int]) -> None:
        del self._followed[kept:]
        self._forget(lambda at: at > kept)
        if self._taken > kept:
            self._matcher.back(self._taken - kept)
            self._taken = kept
        for token in tokens[kept:]:
            if self._taken == len(self._followed) and self._matcher.advance(token):
                self._taken += 1
            self._followed.append(token)

    def _forget(self, where: Callable[[int], bool]) -> None:
        for known in (self._masks, self._allowed):
            for at in [at for at in known if where(at)]:
                del known[at]


def _apply(mask: Mask, logits: Logits) -> None:
    known = min(len(mask), len(logits))
    np.copyto(logits[:known], np.float32(-np.inf), where=~mask[:known])
    logits[known:] = -np.inf
