"""Prompt lookup where it is worth more than the draft model, the model everywhere else. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.speculation.drafters import Guesser
from tandem.speculation.lookup_policy import PolicedLookup
from tandem.speculation.types import Draft, SamplingParams


class HybridDrafter:
    """A copy costs nothing, and a round that the lookup answers no draft step at all: so the lookup is asked first."""

    def __init__(self, lookup: PolicedLookup, model: Guesser) -> None:
        self._lookup, self._model = lookup, model

    async def open(self, prompt: Sequence[int], sampling: SamplingParams) -> None:
        await self._lookup.open(prompt, sampling)
        await self._model.open(prompt, sampling)

    async def propose(self, tokens: Sequence[int], k: int) -> Draft:
        copied = await self._lookup.propose(tokens, k)
        if copied.token_ids:
            return copied
        draft = await self._model.propose(tokens, k)
        self._lookup.modelled(tokens, draft.token_ids)
        return draft

    async def guess(self, tokens: Sequence[int]) -> Draft:
        copied = await self._lookup.guess(tokens)
        return copied if copied.token_ids else await self._model.guess(tokens)

    def learn(self, tokens: Sequence[int]) -> None:
        self._lookup.learn(tokens)

    async def close(self) -> None:
        await self._lookup.close()
        await self._model.close()
