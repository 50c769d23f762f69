"""An engine's LoRA adapters: named by requests, numbered from 1 in rows (0: none)."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tandem.checkpoints.adapter_files import Adapter, AdapterChoice
from tandem.engine.compatibility import able, refusal
from tandem.runners.capabilities import No
from tandem.speculation.types import InvalidField, Verdict

if TYPE_CHECKING:
    from tandem.engine.batcher import Batcher
    from tandem.runners.protocol import Runner

log = logging.getLogger("tandem.engine")
MOST = 64


@dataclass(slots=True)
class LoadedAdapter:
    """Current `users`, `waiting` of them for a slot, and totals. `committed` includes tokens beyond a stop."""

    number: int
    revision: str
    users: int = 0
    waiting: int = 0
    requests: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    committed: int = 0


class Adapters:
    """The adapters of one runner, added at startup."""

    def __init__(self, runner: Runner, batcher: Batcher) -> None:
        self._runner, self._batcher = runner, batcher
        self._by_name: dict[str, LoadedAdapter] = {}
        self._by_number: dict[int, LoadedAdapter] = {}

    @property
    def revisions(self) -> dict[str, str]:
        return {name: entry.revision for name, entry in self._by_name.items()}

    @property
    def loaded(self) -> dict[str, LoadedAdapter]:
        return dict(self._by_name)

    @property
    def running(self) -> list[str]:
        """The adapters of requests and sessions that have a slot."""
        return [name for name, entry in self._by_name.items() if entry.users > entry.waiting]

    @property
    def waiting(self) -> list[str]:
        return [name for name, entry in self._by_name.items() if entry.waiting]

    def committed(self, number: int, drafted: int, verdict: Verdict) -> None:
        """Counts a round of a row with this adapter."""
        entry = self._by_number.get(number)
        if entry:
            entry.rounds += 1
            entry.drafted += drafted
            entry.accepted += verdict.accepted
            entry.committed += len(verdict.token_ids)

    def check(self, name: str) -> None:
        """Raises InvalidField for an unknown name; the empty name is no adapter."""
        if name and name not in self._by_name:
            known = ", ".join(sorted(self._by_name)) or "this server has none"
            raise InvalidField("adapter", f"{name[:64]!r} is not one of: {known}")

    def revision(self, name: str) -> str:
        """An adapter's revision; empty for none."""
        self.check(name)
        return self._by_name[name].revision if name else ""

    def take(self, name: str) -> int:
        """Counts a user and returns the number for rows, 0 for none. Raises InvalidField."""
        self.check(name)
        if not name:
            return 0
        entry = self._by_name[name]
        entry.users += 1
        entry.requests += 1
        return entry.number

    def take_own(self, name: str) -> int:
        """Like `take`, for a draft: 0 for an unknown name."""
        return self.take(name if name in self._by_name else "")

    def named(self, number: int) -> tuple[str, str]:
        """Name and revision by number; empty for 0."""
        return next(((name, it.revision) for name, it in self._by_name.items() if it.number == number), ("", ""))

    def give_back(self, number: int) -> None:
        if number:
            self._by_number[number].users -= 1

    @contextlib.contextmanager
    def taken(self, name: str) -> Iterator[int]:
        """Takes an adapter while waiting for a slot; gives it back if the body fails."""
        number = self.take(name)
        entry = self._by_number.get(number)
        if entry:
            entry.waiting += 1
        try:
            yield number
        except BaseException:
            self.give_back(number)
            raise
        finally:
            if entry:
                entry.waiting -= 1

    async def add(self, choice: AdapterChoice, read: Callable[[AdapterChoice], Adapter]) -> None:
        """Reads and registers an adapter. Raises CheckpointError or ValueError, one line."""
        model, takes = self._runner.identity.model_name, able(self._runner).adapters
        if isinstance(takes, No):
            raise refusal("adapters", model, "adapters", takes)
        if choice.name == model:
            raise ValueError(f"adapters: {choice.name!r} is the model's own name")
        if len(self._by_name) >= MOST:
            raise ValueError(f"adapters: {choice.name!r} would be one more than {MOST} adapters")
        number, adapter = len(self._by_name) + 1, read(choice)
        await self._batcher.on_device(takes, number, adapter)
        self._by_name[choice.name] = self._by_number[number] = LoadedAdapter(number, adapter.revision)
        log.info("adapter %s: %d matrices, revision %s", choice.name, len(adapter.parts), adapter.revision[:12])
