"""Admits sequences by the memory of their KV slots: an admitted sequence never runs out of it.

Slots take memory as they are written, so all slots at full length may exceed the limit. A sequence reserves its
maximum with its slot. The pages of a freed slot go back before any later step.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence

from tandem.engine.batcher import Batcher
from tandem.engine.compatibility import able, refusal
from tandem.engine.slots import SlotPool
from tandem.runners.capabilities import MemoryOnDemand, No
from tandem.runners.protocol import Runner

log = logging.getLogger("tandem.engine")

MIB = 2**20


class KVMemory:
    """Bytes that sequences reserve, of at most `limit`; `give_back` frees a slot's pages before any later step."""

    def __init__(
        self, limit: int, most_tokens: int, cost: Callable[[int], int], give_back: Callable[[int], object]
    ) -> None:
        self.limit, self._most_tokens = limit, most_tokens
        self._cost, self._give_back = cost, give_back
        self._reserved: dict[int, int] = {}
        self.reserved = 0  # bytes; any thread may read them

    def cost(self, tokens: int | None) -> int:
        """Bytes that a sequence of up to `tokens` (None: full length) reserves."""
        return self._cost(self._most_tokens if tokens is None else min(tokens, self._most_tokens))

    def reserved_by(self, slot: int) -> int:
        return self._reserved.get(slot, 0)

    def fits(self, tokens: int | None) -> bool:
        """Whether a sequence of up to `tokens` can be admitted now."""
        return self.reserved + self.cost(tokens) <= self.limit

    def take(self, slot: int, tokens: int | None) -> None:
        """Reserves memory for a sequence in `slot`, after `fits`."""
        self._reserved[slot] = self.cost(tokens)
        self.reserved += self._reserved[slot]

    def release(self, slot: int) -> None:
        """Frees the reservation of `slot` and its pages."""
        if slot in self._reserved:
            self.reserved -= self._reserved.pop(slot)
            self._give_back(slot)


def limit_kv_memory(slots: SlotPool, batcher: Batcher, runners: Sequence[Runner], given: int) -> None:
    """Bounds the memory of `slots` to `given` bytes, before there are sequences. Raises ValueError."""
    on_demand = [_on_demand(runner) for runner in runners]
    most = max(runner.limits.max_length for runner in runners)
    limit = given - sum(memory.spare_bytes for memory in on_demand)

    def cost(tokens: int) -> int:
        return sum(memory.kv_bytes(tokens) for memory in on_demand)

    def give_back(slot: int) -> None:
        for memory in on_demand:
            batcher.between_steps(functools.partial(memory.give_back, slot, 0))

    if cost(most) > limit:
        least = -(-(given - limit + cost(most)) // MIB)
        raise ValueError(
            f"kv_cache_mb: {given // MIB} is too little for a sequence of sequence_length {most}, which takes {least}"
        )
    slots.memory = KVMemory(limit, most, cost, give_back)
    whole = limit // cost(most)
    log.info("KV slots: %d in %d MiB, which is memory for %d of %d tokens", slots.count, given // MIB, whole, most)


def _on_demand(runner: Runner) -> MemoryOnDemand:
    memory = able(runner).memory_on_demand
    if isinstance(memory, No):
        raise refusal("kv_cache_mb", runner.identity.model_name, "memory_on_demand", memory)
    return memory
