"""Keeps an engine's LoRA adapters: which names requests may give, how many use each, and when one may go.

Requests name adapters, rows number them. A number is never used again, so that neither a late row nor a kept prefix can
meet an adapter that came later under the same name.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from tandem.checkpoints.adapter_files import Adapter, AdapterChoice
from tandem.engine.compatibility import able, refusal
from tandem.runners.capabilities import No, TakesAdapters
from tandem.speculation.types import InvalidField, Verdict

if TYPE_CHECKING:
    from tandem.engine.batcher import Batcher
    from tandem.runners.protocol import Runner

log = logging.getLogger("tandem.engine")
MOST = 64
Result = TypeVar("Result")


class AdapterExists(InvalidField):
    """The name is that of another adapter."""


class AdapterInUse(RuntimeError):
    """Requests or sessions still use the adapter."""


@dataclass(slots=True)
class LoadedAdapter:
    """An adapter that is used by `users` now, of whom `waiting` have no slot yet, and what it was used for in all.

    `requests`: those and sessions that took it. `committed`: tokens of its rounds, those beyond a stop included.
    """

    taken_by: TakesAdapters
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
    """The adapters of one runner. Names change on the event loop, weights on the device thread between steps."""

    def __init__(self, runner: Runner, batcher: Batcher) -> None:
        self._runner, self._batcher = runner, batcher
        self._by_name: dict[str, LoadedAdapter] = {}
        self._by_number: dict[int, LoadedAdapter] = {}
        self.changing: dict[str, asyncio.Task[Any]] = {}  # by the names that are being added or removed
        self._last = 0
        self._reading = ThreadPoolExecutor(1, "adapters")

    @property
    def revisions(self) -> dict[str, str]:
        """The revision of each adapter that requests may name."""
        return {name: entry.revision for name, entry in self._by_name.items()}

    @property
    def loaded(self) -> dict[str, LoadedAdapter]:
        """The adapters that requests may name."""
        return dict(self._by_name)

    @property
    def running(self) -> list[str]:
        """The adapters of requests and sessions that have a slot."""
        return [name for name, entry in self.loaded.items() if entry.users > entry.waiting]

    @property
    def waiting(self) -> list[str]:
        """The adapters of requests and sessions that wait for a slot."""
        return [name for name, entry in self.loaded.items() if entry.waiting]

    def committed(self, number: int, drafted: int, verdict: Verdict) -> None:
        """Counts a round of rows with the adapter of this number; of 0 there is nothing to count."""
        entry = self._by_number.get(number)
        if entry:
            entry.rounds += 1
            entry.drafted += drafted
            entry.accepted += verdict.accepted
            entry.committed += len(verdict.token_ids)

    def check(self, name: str) -> None:
        """Raises InvalidField unless requests may name this adapter; the empty name is that of none."""
        if name and name not in self._by_name:
            known = ", ".join(sorted(self._by_name)) or "this server has none"
            raise InvalidField("adapter", f"{name[:64]!r} is not one of: {known}")

    def revision(self, name: str) -> str:
        """The revision of an adapter that requests may name; empty for none."""
        self.check(name)
        return self._by_name[name].revision if name else ""

    def take(self, name: str) -> int:
        """Returns the number that rows give, 0 for none, and counts a user. Raises InvalidField."""
        self.check(name)
        if not name:
            return 0
        entry = self._by_name[name]
        entry.users += 1
        entry.requests += 1
        return entry.number

    def take_own(self, name: str) -> int:
        """Like `take`, for a draft, which does without an adapter where it has none of that name."""
        return self.take(name if name in self._by_name else "")

    def named(self, number: int) -> tuple[str, str]:
        """The name and the revision of an adapter that is in use, by the number of `take`; both empty for 0."""
        return next(((name, it.revision) for name, it in self._by_name.items() if it.number == number), ("", ""))

    def give_back(self, number: int) -> None:
        """Ends a use that `take` began."""
        if number:
            self._by_number[number].users -= 1

    @contextlib.contextmanager
    def taken(self, name: str) -> Iterator[int]:
        """Takes an adapter for what waits for a slot in the body, and gives it back if the body fails."""
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

    def taker(self, flag: str) -> TakesAdapters:
        """Returns what takes the runner's adapters. Raises ValueError, one line that names `flag`, if nothing does."""
        takes = able(self._runner).adapters
        if isinstance(takes, No):
            raise refusal(flag, self._runner.identity.model_name, "adapters", takes)
        return takes

    async def add(self, choice: AdapterChoice, read: Callable[[AdapterChoice], Adapter]) -> str:
        """Reads an adapter and makes its name known; returns its revision. Steps wait only while it is packed.

        What has begun is finished also if the caller is cancelled. Raises InvalidField if the name is taken,
        CheckpointError or ValueError, one line, if the adapter cannot be served.
        """
        takes = self.taker("adapters")
        if choice.name in self._by_name or choice.name in self.changing:
            raise AdapterExists("adapter", f"{choice.name!r} is there already; remove it first")
        if choice.name == self._runner.identity.model_name:
            raise InvalidField("adapter", f"{choice.name!r} is the model's own name")
        if len(self._by_name) + len(self.changing) >= MOST:
            raise InvalidField("adapter", f"{choice.name!r} would be one more than {MOST} adapters")
        self._last += 1
        return await self._finished(choice.name, self._put(takes, self._last, choice, read))

    async def _put(
        self, takes: TakesAdapters, number: int, choice: AdapterChoice, read: Callable[[AdapterChoice], Adapter]
    ) -> str:
        adapter = await asyncio.get_running_loop().run_in_executor(self._reading, read, choice)
        await self._batcher.on_device(takes.put_adapter, number, adapter)
        self._by_name[choice.name] = self._by_number[number] = LoadedAdapter(takes, number, adapter.revision)
        log.info("adapter %s: %d matrices, revision %s", choice.name, len(adapter.parts), adapter.revision[:12])
        return adapter.revision

    async def remove(self, name: str) -> None:
        """Forgets an adapter and frees its memory, also if the caller is cancelled meanwhile.

        Raises InvalidField if there is none, AdapterInUse if it is used.
        """
        if not name:
            raise InvalidField("adapter", "empty: name one")
        self.check(name)
        entry = self._by_name[name]
        if entry.users:
            raise AdapterInUse(f"adapter {name} is in use by {entry.users} requests or sessions; try again after them")
        del self._by_name[name], self._by_number[entry.number]
        await self._finished(name, self._batcher.on_device(entry.taken_by.drop_adapter, entry.number))
        log.info("adapter %s is removed", name)

    async def _finished(self, name: str, change: Coroutine[Any, Any, Result]) -> Result:
        """Awaits a change, which goes on if the caller is cancelled. Until it ends the name cannot be added again."""
        task = self.changing[name] = asyncio.ensure_future(change)
        task.add_done_callback(lambda task: self._ended(name, task))
        return await asyncio.shield(task)

    def _ended(self, name: str, task: asyncio.Task[Any]) -> None:
        del self.changing[name]
        if not task.cancelled() and (error := task.exception()):  # which the caller gets, if it is still there
            log.info("adapter %s could not be added or removed: %.300r", name, error)
