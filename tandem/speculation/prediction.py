"""Follows an output through the text that its client predicted it to be (OpenAI's predicted outputs)."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from tandem.speculation.drafters import NgramDrafter

LONGEST = 8
"""Agreeing tokens that are counted; a prediction that was not contradicted yet counts as so many."""
SURE = 4
"""Agreeing tokens from which the output is taken to have gone on there."""
NEAR = 64
"""Places of a token to compare, on either side of the expected one."""


class _Place(NamedTuple):
    """`at`: the predicted tokens before this place; `size`: the last of them that agree with the output (0: lost).

    `expected`: where the output would be, had it gone on from the last sure place token by token.
    """

    at: int
    size: int
    expected: int


class PredictionDrafter(NgramDrafter):
    """Proposes how the prediction goes on, where lookup proposes how the text does.

    Where the output differs, it goes on after the place where most of the last tokens agree; of several, the nearest.
    """

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
        """Forgets nothing: it may be opened again."""

    def match(self, tokens: Sequence[int], k: int) -> tuple[int, tuple[int, ...]]:
        """Returns how many of the last tokens agree (0: none), and the `k` predicted tokens after them."""
        self.note(tokens)
        place = self._places[-1]
        copied = self._predicted[place.at : place.at + k] if place.size else ()
        return place.size if copied else 0, copied

    def note(self, tokens: Sequence[int]) -> None:
        """Follows the output, which may have lost tokens."""
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
        """Returns how many of the output's last tokens stand before a place."""
        most = min(LONGEST, at, len(self._indexed) - self._start)
        return next((n for n in range(most) if self._predicted[at - 1 - n] != self._indexed[-1 - n]), most)
