"""Defines how a runner takes LoRA adapters, which change what its model computes for the rows that name them.

Rows of different adapters, and of none, share steps. A row has the same bits alone as beside any others; rows without
an adapter have those of a runner that has no adapters.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from tandem.checkpoints.adapters import Adapter


@runtime_checkable
class TakesAdapters(Protocol):
    """A runner that may be able to take adapters; on its device thread, between steps."""

    @property
    def no_adapters(self) -> str:
        """Why this runner takes no adapters; empty if it does. Final once `warm_up` has returned."""

    def put_adapter(self, number: int, adapter: Adapter) -> None:
        """From now on, rows may name the adapter by this number, which is above 0 and was never used before.

        Raises ValueError, one line, naming the module that does not fit the model; nothing has changed then.
        """

    def drop_adapter(self, number: int) -> None:
        """Frees the memory of an adapter, which no later row names."""


def why_no_adapters(runner: object) -> str:
    """Why a runner takes no adapters; empty if it does."""
    return str(getattr(runner, "no_adapters", "its steps take none"))
