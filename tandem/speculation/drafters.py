"""What proposes draft tokens. A drafter may be wrong about anything but never changes the output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from tandem.speculation.types import Draft, Proposer, SamplingParams


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


def teach(drafter: Drafter | None, tokens: Sequence[int]) -> None:
    """Tells a drafter that learns (it has `learn(tokens)`) that all of `tokens`, the prompt first, is committed now."""
    learn = getattr(drafter, "learn", None)  # to ask isinstance of a protocol takes longer than the learning
    if learn:
        learn(tokens)


class _Noted(NamedTuple):
    """At one position: the n-grams that end before it, the longest first, each with where its follower stood earlier;
    and the longest that had one."""

    grams: list[tuple[tuple[int, ...], int | None]]
    size: int
    start: int


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
        self._noted: list[_Noted] = []  # by position

    async def open(self, prompt: Sequence[int], sampling: SamplingParams) -> None:
        self._forget()

    async def propose(self, tokens: Sequence[int], k: int) -> Draft:
        _, copied = self.match(tokens, k)
        return Draft(copied, proposed_by=(Proposer.NGRAM,) * len(copied))

    def match(self, tokens: Sequence[int], k: int) -> tuple[int, tuple[int, ...]]:
        """How many last tokens stood somewhere before (0: none), and the `k` that followed them there."""
        self.note(tokens)
        size, start = self._find(tokens)
        return size, tuple(_copy(tokens, start, k, len(tokens))) if size else ()

    def matched(self, tokens: Sequence[int], at: int, k: int) -> tuple[int, tuple[int, ...]]:
        """Likewise after the first `at` of `tokens`, which were noted and go on."""
        noted = self._noted[at]
        return noted.size, tuple(_copy(tokens, noted.start, k, at)) if noted.size else ()

    async def guess(self, tokens: Sequence[int]) -> Draft:
        return await self.propose(tokens, 1)

    async def close(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._follower.clear()
        self._indexed.clear()
        self._noted.clear()

    def note(self, tokens: Sequence[int]) -> None:
        """Notes for every n-gram that is followed by a token where its latest follower stands."""
        start = len(self._indexed)
        if self._indexed != list(tokens[:start]):
            start = _common(self._indexed, tokens)
            self._roll_back(start)
        for at in range(start, len(tokens)):
            before = tuple(tokens[max(0, at - self._sizes[0]) : at])
            grams = [(before[-n:], self._follower.get(before[-n:])) for n in self._sizes if n <= at]
            size, found = next(((len(gram), stood) for gram, stood in grams if stood is not None), (0, 0))
            self._noted.append(_Noted(grams, size, found))
            self._follower.update((gram, at) for gram, _ in grams)
        self._indexed += tokens[start:]

    def _roll_back(self, length: int) -> None:
        """To the first `length` tokens. A loop that drafts ahead comes here at every wrong guess."""
        del self._indexed[length:]
        while len(self._noted) > length:
            for gram, before in self._noted.pop().grams:
                if before is None:
                    del self._follower[gram]
                else:
                    self._follower[gram] = before

    def _find(self, tokens: Sequence[int]) -> tuple[int, int]:
        last = tuple(tokens[-self._sizes[0] :])
        for n in self._sizes:
            at = self._follower.get(last[-n:]) if n <= len(last) else None
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
