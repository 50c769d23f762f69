"""Follows an output whose first tokens the request knows, to report their log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tandem.speculation.processing import Mask


class KnownOutput:
    """A Matcher that allows `known[i]` alone as token i of the output, and any token after the last of them."""

    def __init__(self, known: Sequence[int], vocab_size: int) -> None:
        self._known, self._vocab_size = known, vocab_size
        self._taken = 0

    def mask(self) -> Mask:
        if self._taken >= len(self._known):
            return np.ones(self._vocab_size, dtype=np.bool_)
        mask = np.zeros(self._vocab_size, dtype=np.bool_)
        mask[self._known[self._taken]] = True
        return mask

    def allows(self, token: int) -> bool:
        return self._taken >= len(self._known) or self._known[self._taken] == token

    def advance(self, token: int) -> bool:
        allowed = self.allows(token)
        self._taken += allowed
        return allowed

    def back(self, count: int) -> None:
        self._taken -= count
