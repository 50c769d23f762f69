"""Follows an output through its client's prediction (OpenAI's predicted outputs)."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from tandem.speculation.drafters import NgramDrafter

LONGEST = 8  # most agreeing tokens counted; the value of a prediction not yet contradicted
SURE = 4  # agreeing tokens that fix the place
NEAR = 64  # occurrences compared on either side of the expected place


class _Place(NamedTuple):
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
        self._places = [_Place(0, LONGEST, 0)]  # by output tokens

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

    def _next(self, token: int) -> _Place:
        at, size, expected = self._places[-1]
        if self._predicted[at : at + 1] == (token,):
            return _Place(at + 1, min(size + 1, LONGEST), at + 1 if size + 1 >= SURE else expected + 1)
        after = self._after.get(token, [])
        near = bisect_left(after, expected + 1)
        places = after[max(0, near - NEAR) : near + NEAR]
        found = max(((self._agreeing(each), -abs(each - expected - 1), each) for each in places), default=None)
        return _Place(found[2], found[0], expected + 1) if found else _Place(expected + 1, 0, expected + 1)

    def _agreeing(self, at: int) -> int:
        most = min(LONGEST, at, len(self._indexed) - self._start)
        return next((n for n in range(most) if self._predicted[at - 1 - n] != self._indexed[-1 - n]), most)
