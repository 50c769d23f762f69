"""Drafter protocols and prompt lookup. A drafter may be wrong; it never changes the output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tandem.speculation.common_prefix import common
from tandem.speculation.types import Draft, Proposer


class Drafter(Protocol):
    """Proposes draft tokens for one request."""

    async def open(self, prompt: Sequence[int]) -> None:
        """Prepares for a request with this prompt."""

    async def propose(self, tokens: Sequence[int], k: int, model_k: int | None = None) -> Draft:
        """Returns at most `k` tokens after `tokens` (prompt and output), at most `model_k` (None: `k`) of a model."""

    async def close(self) -> None:
        """Frees resources; idempotent, at any time."""


class BonusDrafter(Drafter, Protocol):
    """A Drafter that also predicts a round's bonus token. Its calls may be cancelled at any time."""

    async def draft_bonus(self, tokens: Sequence[int]) -> Draft:
        """Returns one token or none, drawn with the noise of the target's draw under either rule."""


class NgramDrafter:
    """Prompt lookup (Saxena 2023): copies what followed the longest match of the last tokens, the latest of several."""

    def __init__(self, longest: int = 5, shortest: int = 1, only_grows: bool = False) -> None:
        if not 1 <= shortest <= longest:
            raise ValueError(f"n-gram sizes: need 1 <= shortest <= longest, not {shortest} and {longest}")
        self._only_grows = only_grows
        self._sizes = range(longest, shortest - 1, -1)
        self._follower: dict[tuple[int, ...], int] = {}
        self._indexed: list[int] = []
        # By position, the n-grams that end before it, longest first, each with the earlier position of its follower.
        self._entries: list[list[tuple[tuple[int, ...], int | None]]] = []

    async def open(self, prompt: Sequence[int]) -> None:
        self._forget()

    async def propose(self, tokens: Sequence[int], k: int, model_k: int | None = None) -> Draft:
        _, copied = self.match(tokens, k)
        return Draft(copied, proposed_by=(Proposer.NGRAM,) * len(copied))

    def match(self, tokens: Sequence[int], k: int) -> tuple[int, tuple[int, ...]]:
        """Returns the length of the match (0: none) and the `k` tokens after it."""
        self.note(tokens)
        size, start = self._find(tokens)
        again = len(tokens) - start  # a copy that reaches the end goes on with itself
        return size, tuple([tokens[start + i % again] for i in range(k)]) if size else ()

    def _known(self, tokens: Sequence[int]) -> int:
        known = min(len(self._indexed), len(tokens))
        return known if self._only_grows else common(self._indexed, tokens)

    async def draft_bonus(self, tokens: Sequence[int]) -> Draft:
        return await self.propose(tokens, 1)

    async def close(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._follower.clear()
        self._indexed.clear()
        self._entries.clear()

    def note(self, tokens: Sequence[int]) -> None:
        """Indexes `tokens`: for every n-gram the position after its latest occurrence."""
        start = self._known(tokens)
        self._roll_back(start)
        for at in range(start, len(tokens)):
            before = tuple(tokens[max(0, at - self._sizes[0]) : at])
            grams = [before[-n:] for n in self._sizes if n <= at]
            self._entries.append([(gram, self._follower.get(gram)) for gram in grams])
            self._follower.update(dict.fromkeys(grams, at))
        self._indexed += tokens[start:]

    def _roll_back(self, length: int) -> None:
        del self._indexed[length:]
        while len(self._entries) > length:
            for gram, before in self._entries.pop():
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
