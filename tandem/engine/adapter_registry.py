"""An engine's LoRA adapters: named by requests, numbered from 1 in rows (0: none)."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from tandem.checkpoints.adapter_files import Adapter, AdapterChoice
from tandem.engine.compatibility import able, refusal
from tandem.runners.capabilities import No
from tandem.speculation.types import InvalidField

if TYPE_CHECKING:
    from tandem.engine.batcher import Batcher
    from tandem.runners.protocol import Runner

log = logging.getLogger("tandem.engine")
MOST = 64


class Adapters:
    """The adapters of one runner, added at startup; numbers follow the order of `revisions`, by name."""

    def __init__(self, runner: Runner, batcher: Batcher) -> None:
        self._runner, self._batcher = runner, batcher
        self.revisions: dict[str, str] = {}
        self.users, self._waiting = Counter[int](), Counter[int]()  # by number; of users, those that wait for a slot

    @property
    def running(self) -> list[str]:
        """The adapters of requests and sessions that have a slot."""
        return [name for number, name in enumerate(self.revisions, 1) if self.users[number] > self._waiting[number]]

    @property
    def waiting(self) -> list[str]:
        return [name for number, name in enumerate(self.revisions, 1) if self._waiting[number]]

    def check(self, name: str) -> None:
        """Raises InvalidField for an unknown name; the empty name is no adapter."""
        if name and name not in self.revisions:
            known = ", ".join(sorted(self.revisions)) or "this server has none"
            raise InvalidField("adapter", f"{name[:64]!r} is not one of: {known}")

    def revision(self, name: str) -> str:
        """An adapter's revision; empty for none."""
        self.check(name)
        return self.revisions.get(name, "")

    def take(self, name: str) -> int:
        """Counts a user and returns the number for rows, 0 for none. Raises InvalidField."""
        self.check(name)
        number = [*self.revisions].index(name) + 1 if name else 0
        self.users[number] += 1
        return number

    def take_own(self, name: str) -> int:
        """Like `take`, for a draft: 0 for an unknown name."""
        return self.take(name if name in self.revisions else "")

    def named(self, number: int) -> tuple[str, str]:
        """Name and revision by number; empty for 0."""
        return [("", ""), *self.revisions.items()][number]

    def give_back(self, number: int) -> None:
        self.users[number] -= 1

    @contextlib.contextmanager
    def taken(self, name: str) -> Iterator[int]:
        """Takes an adapter while waiting for a slot; gives it back if the body fails."""
        number = self.take(name)
        self._waiting[number] += 1
        try:
            yield number
        except BaseException:
            self.give_back(number)
            raise
        finally:
            self._waiting[number] -= 1

    async def add(self, choice: AdapterChoice, read: Callable[[AdapterChoice], Adapter]) -> None:
        """Reads and registers an adapter. Raises CheckpointError or ValueError, one line."""
        model, takes = self._runner.identity.model_name, able(self._runner).adapters
        if isinstance(takes, No):
            raise refusal("adapters", model, "adapters", takes)
        if choice.name == model:
            raise ValueError(f"adapters: {choice.name!r} is the model's own name")
        if len(self.revisions) >= MOST:
            raise ValueError(f"adapters: {choice.name!r} would be one more than {MOST} adapters")
        number, adapter = len(self.revisions) + 1, read(choice)
        await self._batcher.on_device(takes, number, adapter)
        self.revisions[choice.name] = adapter.revision
        log.info("adapter %s: %d matrices, revision %s", choice.name, len(adapter.parts), adapter.revision[:12])
