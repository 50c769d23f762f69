"""Defines runners whose KV slots take memory as they are written, not all of it from the start.

A slot is whole in addresses, so that steps read it as ever; the system gives its pages when they are first written.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable


@runtime_checkable
class TakesMemoryOnDemand(Protocol):
    """A runner that may be such a one; final once `warm_up` has returned, after which no slot has memory."""

    @property
    def reserved_whole(self) -> str:
        """Why the slots of this runner are reserved whole instead; empty if they are not."""

    @property
    def spare_bytes(self) -> int:
        """Most bytes that steps take besides those of their rows' slots, for padding."""

    def kv_bytes(self, tokens: int) -> int:
        """Most bytes that a slot takes for a sequence that never has more than `tokens` tokens, drafts included."""

    def give_back(self, slot: int, tokens: int = 0) -> None:
        """Gives back the memory of a slot beyond kv_bytes(tokens); for 0 all of it. On the device thread."""
