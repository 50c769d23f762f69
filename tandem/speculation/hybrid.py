"""Prompt lookup with a draft model."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.speculation.drafters import BonusDrafter
from tandem.speculation.lookup_policy import PolicedLookup
from tandem.speculation.types import Draft


class HybridDrafter:
    """Copies where lookup finds a match, at no draft step; else the model drafts."""

    def __init__(self, lookup: PolicedLookup, model: BonusDrafter) -> None:
        self._lookup, self._model = lookup, model

    async def open(self, prompt: Sequence[int]) -> None:
        await self._lookup.open(prompt)
        await self._model.open(prompt)

    async def propose(self, tokens: Sequence[int], k: int, model_k: int | None = None) -> Draft:
        copied = self._lookup.copy(tokens, k)
        return copied if copied.token_ids else await self._model.propose(tokens, k, model_k)

    async def draft_bonus(self, tokens: Sequence[int]) -> Draft:
        copied = self._lookup.copy(tokens, 1)
        return copied if copied.token_ids else await self._model.draft_bonus(tokens)

    async def close(self) -> None:
        await self._lookup.close()
        await self._model.close()
