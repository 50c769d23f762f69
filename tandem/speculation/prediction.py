"""Follows an output through the text that its client predicted it to be (OpenAI's predicted outputs)."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from tandem.speculation.common_prefix import common
from tandem.speculation.types import Draft, Proposer

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


class PredictionDrafter:
    """Proposes how the prediction goes on. It can stand for the n-gram lookup of a PolicedLookup.

    Where the output differs, it goes on after the place where most of the last tokens agree; of several, the nearest.
    """

    def __init__(self, predicted: Sequence[int]) -> None:
        self._predicted = tuple(predicted)
        self._after = defaultdict[int, list[int]](list)  # by token, the places after it
        for at, token in enumerate(self._predicted, 1):
            self._after[token].append(at)
        self._start = 0
        self._output: list[int] = []
        self._places = [_Place(0, LONGEST, 0)]  # by output tokens

    async def open(self, prompt: Sequence[int]) -> None:
        self._start = len(prompt)

    async def propose(self, tokens: Sequence[int], k: int, model_k: int | None = None) -> Draft:
        _, copied = self.match(tokens, k)
        return Draft(copied, proposed_by=(Proposer.NGRAM,) * len(copied))

    async def draft_bonus(self, tokens: Sequence[int]) -> Draft:
        return await self.propose(tokens, 1)

    async def close(self) -> None:
        """Holds nothing that others wait for."""

    def match(self, tokens: Sequence[int], k: int) -> tuple[int, tuple[int, ...]]:
        """Returns how many of the last tokens agree (0: none), and the `k` predicted tokens after them."""
        self.note(tokens)
        return self.match_at(tokens, len(tokens), k)

    def match_at(self, tokens: Sequence[int], at: int, k: int) -> tuple[int, tuple[int, ...]]:
        """Like `match`, for tokens[:at], where more than `at` of `tokens` are noted already."""
        place = self._places[max(0, at - self._start)]
        copied = self._predicted[place.at : place.at + k] if place.size else ()
        return place.size if copied else 0, copied

    def has(self, tokens: Sequence[int]) -> bool:
        """Returns whether the noted tokens begin with `tokens`."""
        return common(self._output, tokens[self._start :]) == max(0, len(tokens) - self._start)

    def note(self, tokens: Sequence[int]) -> None:
        """Follows the output, which may have lost tokens."""
        output = tokens[self._start :]
        same = common(self._output, output)
        del self._output[same:], self._places[same + 1 :]
        for token in output[same:]:
            self._output.append(token)
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
        most = min(LONGEST, at, len(self._output))
        return next((n for n in range(most) if self._predicted[at - 1 - n] != self._output[-1 - n]), most)
