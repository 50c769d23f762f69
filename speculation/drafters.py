"""What proposes draft tokens. A drafter may be wrong about anything but never changes the output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from speculation.types import Draft, Proposer, SamplingParams


class Drafter(Protocol):
    """Proposes for one request."""

    async def open(self, prompt: Sequence[int], sampling: SamplingParams) -> None:
        """Prepares for a request that begins with `prompt`."""

    async def propose(self, tokens: Sequence[int], k: int) -> Draft:
        """At most `k` tokens that may follow `tokens`, the prompt and everything committed."""

    async def close(self) -> None:
        """Frees what `open` took. May be called at any time, and again."""


class Guesser(Drafter, Protocol):
    """A drafter that can also say what the target's own next token will be. A proposal may be cancelled at any time."""

    async def guess(self, tokens: Sequence[int]) -> Draft:
        """One token, or none: drawn with the noise of the target's own draw, whatever the rule."""


def teach(drafter: Drafter | None, tokens: Sequence[int], committed: Sequence[int]) -> None:
    """Tells a drafter that learns (it has `learn(tokens)`) that `committed` was committed after `tokens`."""
    learn = getattr(drafter, "learn", None)  # to ask isinstance of a protocol takes longer than the learning
    if learn:
        learn([*tokens, *committed])


class NgramDrafter:
    """Prompt lookup: what followed the longest earlier occurrence of the last tokens (Saxena 2023). No weights.

    Of several occurrences the latest counts. A copy that runs into the end of the tokens goes on into itself, so a
    period of any length continues.
    """

    def __init__(self, longest: int = 5, shortest: int = 1) -> None:
        if not 1 <= shortest <= longest:
            raise ValueError(f"n-gram sizes: need 1 <= shortest <= longest, not {shortest} and {longest}")
        self._sizes = range(longest, shortest - 1, -1)
        self._follower: dict[tuple[int, ...], int] = {}
        self._indexed: list[int] = []
        self._noted: list[list[tuple[tuple[int, ...], int | None]]] = []  # by position: n-grams, and who stood before

    async def open(self, prompt: Sequence[int], sampling: SamplingParams) -> None:
        self._forget()

    async def propose(self, tokens: Sequence[int], k: int) -> Draft:
        _, copied = self.match(tokens, k)
        return Draft(copied, proposed_by=(Proposer.NGRAM,) * len(copied))

    def match(self, tokens: Sequence[int], k: int, end: int | None = None) -> tuple[int, tuple[int, ...]]:
        """How many last tokens stood somewhere before (0: none), and the `k` that followed them there.

        Of `tokens` the first `end` are looked at (None: all).
        """
        end = len(tokens) if end is None else end
        self._index(tokens, end)
        size, start = self._find(tokens, end)
        return size, tuple(_copy(tokens, start, k, end)) if size else ()

    async def guess(self, tokens: Sequence[int]) -> Draft:
        return await self.propose(tokens, 1)

    async def close(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._follower.clear()
        self._indexed.clear()
        self._noted.clear()

    def _index(self, tokens: Sequence[int], end: int) -> None:
        """Notes for every n-gram that is followed by a token where its latest follower stands."""
        start = len(self._indexed)
        if start > end or self._indexed != list(tokens[:start]):
            start = _common(self._indexed, tokens[:end])
            self._roll_back(start)
        for at in range(start, end):
            before = tuple(tokens[max(0, at - self._sizes[0]) : at])
            grams = [before[-n:] for n in self._sizes if n <= at]
            self._noted.append([(gram, self._follower.get(gram)) for gram in grams])
            self._follower.update(dict.fromkeys(grams, at))
        self._indexed += tokens[start:end]

    def _roll_back(self, length: int) -> None:
        """To the first `length` tokens. A loop that drafts ahead comes here at every wrong guess."""
        del self._indexed[length:]
        while len(self._noted) > length:
            for gram, before in self._noted.pop():
                if before is None:
                    del self._follower[gram]
                else:
                    self._follower[gram] = before

    def _find(self, tokens: Sequence[int], end: int) -> tuple[int, int]:
        last = tuple(tokens[max(0, end - self._sizes[0]) : end])
        for n in self._sizes:
            at = self._follower.get(last[-n:]) if n <= end else None
            if at is not None:
                return n, at
        return 0, 0


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """How many tokens both begin with."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))


def _copy(tokens: Sequence[int], start: int, k: int, end: int) -> list[int]:
    copied: list[int] = []
    for source in range(start, start + k):
        copied.append(tokens[source] if source < end else copied[source - end])
    return copied
