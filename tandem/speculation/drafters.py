"""Drafters, prompt lookup and predictions. A drafter may be wrong; it never changes the output."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from tandem.speculation.types import Draft, LengthPlan, Proposer, common


class Drafter(Protocol):
    """Proposes draft tokens for one request. Its calls may be cancelled at any time."""

    async def open(self, prompt: Sequence[int]) -> None:
        """Prepares for a request with this prompt."""
        return

    async def propose(self, tokens: Sequence[int], plan: LengthPlan) -> Draft:
        """Returns what may follow `tokens` (prompt and output): at most `plan.k` tokens."""

    async def draft_bonus(self, tokens: Sequence[int]) -> Draft:
        """Returns a round's bonus token or none, drawn with the noise of the target's draw under either rule."""
        return await self.propose(tokens, LengthPlan(1, 1))

    async def close(self) -> None:
        """Frees resources; idempotent, at any time."""
        return


MOST_PLACES = 64  # compared for the longest match, the latest first


class NgramDrafter(Drafter):
    """Prompt lookup (Saxena 2023): copies what followed the longest match of the last tokens, the latest of several.

    `only_grows`: `tokens` always extend those of the call before.
    """

    def __init__(self, longest: int = 5, shortest: int = 1, only_grows: bool = False) -> None:
        if not 1 <= shortest <= longest:
            raise ValueError(f"n-gram sizes: need 1 <= shortest <= longest, not {shortest} and {longest}")
        self._longest, self._shortest, self._only_grows = longest, shortest, only_grows
        self._indexed: list[int] = []
        # Places after a token, and after two, ascending
        self._places_after: defaultdict[int | tuple[int, int], list[int]] = defaultdict(list)

    async def open(self, prompt: Sequence[int]) -> None:
        self._forget()

    async def propose(self, tokens: Sequence[int], plan: LengthPlan) -> Draft:
        _, copied = self.match(tokens, plan.k)
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

    async def close(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._indexed.clear()
        self._places_after.clear()

    def note(self, tokens: Sequence[int]) -> None:
        """Indexes `tokens`."""
        known, after = self._known(tokens), self._places_after
        while len(self._indexed) > known:
            self._indexed.pop()
            if at := len(self._indexed):
                after[self._indexed[-1]].pop()
            if at > 1:
                after[self._indexed[-2], self._indexed[-1]].pop()
        for at in range(known, len(tokens)):
            if at:
                after[tokens[at - 1]].append(at)
            if at > 1:
                after[tokens[at - 2], tokens[at - 1]].append(at)
        self._indexed += tokens[known:]

    def _find(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Returns the length of the longest match, and the place after it."""
        best, start, end = 0, 0, len(tokens)
        if end and self._shortest == 1 and (after := self._places_after.get(tokens[-1])):
            best, start = 1, after[-1]
        if end > 1 and self._longest > 1:
            for at in self._places_after.get((tokens[-2], tokens[-1]), ())[: -MOST_PLACES - 1 : -1]:
                size, most = 2, min(self._longest, at)
                while size < most and tokens[at - 1 - size] == tokens[end - 1 - size]:
                    size += 1
                if size > max(best, self._shortest - 1):
                    best, start = size, at
                if size == self._longest:
                    break
        return best, start


LONGEST = 8  # most agreeing tokens counted; the value of a prediction not yet contradicted
SURE = 4  # agreeing tokens that fix the place
NEAR = 64  # occurrences compared on either side of the expected place


class _Alignment(NamedTuple):
    """A place after `at` predicted tokens."""

    at: int
    size: int  # last tokens that agree with the output; 0: lost
    expected: int  # the place if the output had followed the last sure one token by token


class PredictionDrafter(NgramDrafter):
    """Proposes what follows where most of the output's last tokens agree; of several places the nearest."""

    def __init__(self, predicted: Sequence[int], only_grows: bool = False) -> None:
        super().__init__(only_grows=only_grows)
        self._predicted = tuple(predicted)
        self._after = defaultdict[int, list[int]](list)  # by token, the places after it
        for at, token in enumerate(self._predicted, 1):
            self._after[token].append(at)
        self._start = 0
        self._places = [_Alignment(0, LONGEST, 0)]  # by output tokens

    async def open(self, prompt: Sequence[int]) -> None:
        self._start = len(prompt)

    async def close(self) -> None:
        """Does nothing: it may be opened again."""

    def match(self, tokens: Sequence[int], k: int) -> tuple[int, tuple[int, ...]]:
        """Returns the number of agreeing tokens (0: none) and the `k` predicted ones after them."""
        self.note(tokens)
        place = self._places[-1]
        copied = self._predicted[place.at : place.at + k] if place.size else ()
        return place.size if copied else 0, copied

    def note(self, tokens: Sequence[int]) -> None:
        same = self._known(tokens)
        del self._indexed[same:], self._places[1 + max(0, same - self._start) :]
        for token in tokens[same:]:
            self._indexed.append(token)
            if len(self._indexed) > self._start:
                self._places.append(self._next(token))

    def _next(self, token: int) -> _Alignment:
        at, size, expected = self._places[-1]
        if self._predicted[at : at + 1] == (token,):
            return _Alignment(at + 1, min(size + 1, LONGEST), at + 1 if size + 1 >= SURE else expected + 1)
        after = self._after.get(token, [])
        near = bisect_left(after, expected + 1)
        places = after[max(0, near - NEAR) : near + NEAR]
        found = max(((self._agreeing(each), -abs(each - expected - 1), each) for each in places), default=(0, 0, 0))
        if size > SURE + 1 and found[0] <= SURE:  # one token was replaced, more likely than a jump
            return _Alignment(expected + 1, SURE + 1, expected + 1)
        return _Alignment(found[2] if found[0] else expected + 1, found[0], expected + 1)

    def _agreeing(self, at: int) -> int:
        most = min(LONGEST, at, len(self._indexed) - self._start)
        return next((n for n in range(most) if self._predicted[at - 1 - n] != self._indexed[-1 - n]), most)
