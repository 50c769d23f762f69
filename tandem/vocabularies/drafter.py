"""Translates a draft model's tokens into the target's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tandem.speculation.acceptance import known_prefix
from tandem.speculation.drafters import BonusDrafter
from tandem.speculation.types import Draft, Request
from tandem.vocabularies.mapping import Prefix, Translation


class ForeignDrafter:
    """Drafts for a target of `vocab_size` tokens with the drafter that `make` returns for a request.

    Greedy, without penalties, biases and structure: these name the target's tokens. The rejection rule takes drafts
    without distributions as having probability 1.
    """

    def __init__(
        self,
        translation: Translation,
        make: Callable[[Request], BonusDrafter],
        request: Request,
        vocab_size: int,
        longest: int,
    ) -> None:
        self._drafter = make(Request(adapter=request.adapter, deadline=request.deadline))
        self._translation, self._vocab_size, self._longest = translation, vocab_size, longest
        self._prefix, self._opened = Prefix(translation), False

    async def open(self, prompt: Sequence[int]) -> None:
        """Opens the drafter, unless the translated prompt is too long or ends inside a character."""
        self._prefix = Prefix(self._translation)
        await self._follow(prompt)

    async def propose(self, tokens: Sequence[int], k: int, model_k: int | None = None) -> Draft:
        mine = await self._follow(tokens)
        return self._translated(await self._drafter.propose(mine, k, model_k)) if mine else Draft()

    async def draft_bonus(self, tokens: Sequence[int]) -> Draft:
        mine = await self._follow(tokens)
        return self._translated(await self._drafter.draft_bonus(mine)) if mine else Draft()

    async def close(self) -> None:
        if self._opened:
            self._opened = False
            await self._drafter.close()

    async def _follow(self, tokens: Sequence[int]) -> list[int] | None:
        mine = self._prefix.follow(tokens)
        if not mine or len(mine) >= self._longest:
            return None
        if not self._opened:
            await self._drafter.open(mine)
            self._opened = True
        return mine

    def _translated(self, draft: Draft) -> Draft:
        token_ids = known_prefix(self._translation.drafted(draft.token_ids), self._vocab_size)
        proposers = draft.proposed_by[: len(token_ids)]
        return Draft(token_ids, draft.queue_seconds, draft.compute_seconds, proposers, rows=draft.rows)
