"""A target and a draft model in virtual time, for the pipelined loop: what they say is arithmetic."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.speculation.types import Draft

PROMPT = [5, 6, 7]
VOCABULARY = 97


def truth(tokens: Sequence[int]) -> int:
    """What the target says after `tokens`: depends on all of them."""
    return random.Random(hash(tuple(tokens))).randrange(VOCABULARY)


def said(count: int) -> list[int]:
    tokens = list(PROMPT)
    while len(tokens) < len(PROMPT) + count:
        tokens.append(truth(tokens))
    return tokens[len(PROMPT) :]


@dataclass
class SimulatedDraft:
    """Right with a chance of `acceptance` at every token; takes `seconds` a token. One call at a time, as a device."""

    acceptance: float
    seconds: float = 0.0
    salt: int = 0
    tokens: int = 0
    fails_at: int = -1
    dry: bool = False
    _device: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def open(self, prompt: Sequence[int]) -> None: ...

    async def close(self) -> None: ...

    async def draft_bonus(self, tokens: Sequence[int]) -> Draft:
        return await self.propose(tokens, 1)

    async def propose(self, tokens: Sequence[int], k: int, model_k: int | None = None) -> Draft:
        if self.dry:
            return Draft()
        if self.tokens == self.fails_at:
            raise ValueError("the draft model broke")
        step = asyncio.ensure_future(self._step(k))
        await asyncio.shield(step)  # a device finishes what it began
        proposed: list[int] = []
        for _ in range(k):
            proposed.append(self._one([*tokens, *proposed]))
        return Draft(tuple(proposed), compute_seconds=k * self.seconds)

    async def _step(self, k: int) -> None:
        async with self._device:
            self.tokens += k
            await asyncio.sleep(k * self.seconds)

    def _one(self, tokens: Sequence[int]) -> int:
        right = random.Random(hash((self.salt, *tokens))).random() < self.acceptance
        return truth(tokens) if right else (truth(tokens) + 1) % VOCABULARY
