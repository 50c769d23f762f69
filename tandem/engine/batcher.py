"""Many requests share steps: rows that are ready when the device is free go together.

One device thread per batcher runs every step, so models on it never meet. Rows join and leave between steps; nothing
here knows what a row means.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from tandem.engine.batch_window import BatchWindow
from tandem.engine.slots import SlotPool
from tandem.runners.protocol import RowFailed

log = logging.getLogger("tandem.models")

Row = TypeVar("Row")
Result = TypeVar("Result")
Step = Callable[[Sequence[Any]], Sequence[Any]]
ObserveStep = Callable[[Any, int, float, float], None]
"""Is told of every step: one of its rows, how many it had, the seconds that one waited for it, and its own seconds."""

# After a step its rows come back through the event loop for their next one. At most so many turns of the loop are given
# to them before the next step begins; an idle turn costs microseconds, a half-empty step milliseconds. Once every
# sequence that holds a slot is here, it begins at once: what else the loop has to do, it does beside the step.
_TURNS = 8

# Both threads are Python's: what the loop has to do after a step (0.4 ms of replies, measured) would hold up the next,
# which is there by then. So the loop lets the device begin first; it waits no longer than this, in seconds.
_BEGINS = 0.005

CLOSE_SECONDS = 5.0
"""How long `close` waits for the step that runs."""


class DeviceLost(RuntimeError):
    """A whole step failed: the device, not a row, is at fault."""


class StepHung(DeviceLost):
    """The step that runs takes longer than any should. It may still come back; until then the device is not used."""


@dataclass(frozen=True, slots=True)
class Timed(Generic[Result]):
    """A row's result, the seconds it waited for its step to begin, and the step's own seconds."""

    value: Result
    queue_seconds: float
    compute_seconds: float
    rows: int = 1


@dataclass(slots=True)
class _Waiting:
    step: Step
    row: Any
    limit: int
    since: float
    prefill: bool
    done: asyncio.Future[Timed[Any]]


class Batcher:
    """Gathers rows of the same step, runs it, hands out results, repeats."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"device-{name}")
        self._ready: list[_Waiting] = []
        self._running: list[_Waiting] = []  # rows of the step that runs
        self._hung = ""
        self._again: asyncio.Handle | None = None
        self._turns = _TURNS
        self._patience = BatchWindow()
        self._context = contextvars.Context()  # nobody's, whoever's row came first
        self._pools: list[SlotPool] = []
        self._prefilled = False
        self.observe: ObserveStep | None = None
        self.learn: Callable[[type, float], None] | None = None  # is told each step's kind of row, and its seconds
        self.came_back: Callable[[DeviceLost | None], None] | None = None
        self.stuck = self._closed = False
        self.hung_steps = 0
        self.steps = 0
        self.rows = 0

    def serves(self, slots: SlotPool) -> None:
        """Rows of these slots come here: who holds one may be expected back after a step."""
        self._pools.append(slots)

    @property
    def waiting(self) -> int:
        """Rows that wait for their step."""
        return len(self._ready)

    @property
    def running(self) -> tuple[int, list[Any]]:
        """The number of the step that runs, and its rows: none while the device is free."""
        return self.steps, [waiting.row for waiting in self._running]

    def abandon(self, why: str) -> None:
        """Fails the rows of the step that runs, and all that wait, with StepHung; and who comes until it is back.

        `came_back` is told then, of the error if it failed; the device is used again only if it did not.
        """
        self._hung = why
        self.hung_steps += 1
        for waiting in (*self._running, *self._ready):
            if not waiting.done.done():
                waiting.done.set_exception(StepHung(why))
        self._ready.clear()

    def _sequences(self) -> int:
        """How many sequences are open; at least as many as can be known."""
        return max((pool.count - pool.free for pool in self._pools), default=sys.maxsize)

    async def on_device(self, function: Callable[..., Result], *args: Any) -> Result:
        """Runs `function` on the device thread, between steps."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    async def run(
        self,
        step: Callable[[Sequence[Row]], Sequence[Result | RowFailed]],
        row: Row,
        limit: int,
        prefill: bool = False,
    ) -> Timed[Result]:
        """Runs `row` in the next `step` that has room (at most `limit` rows). Raises RowFailed, StepHung or DeviceLost.

        Of `prefill` rows no two steps run in a row while others wait: newcomers hold up a round by one chunk at most.
        """
        if self._hung:
            raise StepHung(self._hung)
        future = asyncio.get_running_loop().create_future()
        now = time.perf_counter()
        self._ready.append(_Waiting(step, row, limit, now, prefill, future))
        if not prefill:
            self._patience.came(now, bool(self._running))
        self._look()
        return await future

    def _look(self) -> None:
        """Begins a step if the device is free and who is not here is not worth waiting for; else looks again later."""
        if self._running or not self._ready:
            return
        if self._again:
            self._again.cancel()
            self._again = None
        missing, loop = self._sequences() - len(self._ready), asyncio.get_running_loop()
        if missing > 0 and self._turns:
            self._turns -= 1
            self._again = loop.call_soon(self._look, context=self._context)
        elif missing > 0 and (wait := self._worth_waiting(missing)):
            self._again = loop.call_later(wait, self._look, context=self._context)
        elif rows := self._gather():
            self._begin(rows)

    def _worth_waiting(self, missing: int) -> float:
        """Seconds, for rows that are on their way back. A prompt's chunk begins without them: they cannot join it."""
        return 0.0 if self._first().prefill else self._patience.seconds(time.perf_counter(), missing)

    def _begin(self, rows: list[_Waiting]) -> None:
        """Hands `rows` to the device thread, and returns once it is at them."""
        self._running = rows
        tell = functools.partial(asyncio.get_running_loop().call_soon_threadsafe, context=self._context)
        begun = threading.Lock()
        begun.acquire()
        self._thread.submit(_run_and_tell, rows, begun, functools.partial(tell, self._ended, rows))
        begun.acquire(timeout=_BEGINS)

    def _ended(self, rows: list[_Waiting], ran: Timed[Sequence[Any]]) -> None:
        self._running, self._turns = [], _TURNS
        if self._hung:
            return self._returned(ran)
        if not rows[0].prefill:
            self._patience.answered(len(rows), time.perf_counter(), ran.compute_seconds)
        self._hand_out(rows, ran)
        self._look()

    def _returned(self, ran: Timed[Sequence[Any]]) -> None:
        """A step that was abandoned is back; nobody waits for its results."""
        self.steps += 1
        failed = next((result for result in ran.value if isinstance(result, DeviceLost)), None)
        if failed is None:
            self._hung, self._patience = "", BatchWindow()
        if self.came_back:
            self.came_back(failed)

    def _gather(self) -> list[_Waiting]:
        """Rows of the step whose turn it is, oldest first; cancelled ones are dropped."""
        self._turns = _TURNS
        self._ready = [r for r in self._ready if not r.done.done()]
        if not self._ready:
            return []
        first = self._first()
        step, limit, self._prefilled = first.step, first.limit, first.prefill
        chosen = [r for r in self._ready if r.step == step][:limit]
        self._ready = [r for r in self._ready if r not in chosen]
        return chosen

    def _first(self) -> _Waiting:
        """The row that has waited longest; after a prefill, of those that are none, if there are any."""
        others = (row for row in self._ready if not row.prefill)
        return next(others, self._ready[0]) if self._prefilled else self._ready[0]

    def _hand_out(self, rows: list[_Waiting], ran: Timed[Sequence[Any]]) -> None:
        self.steps += 1
        self.rows += len(rows)
        if self.learn:
            self.learn(type(rows[0].row), ran.compute_seconds)
        if self.observe:
            self.observe(rows[0].row, len(rows), ran.queue_seconds, ran.compute_seconds)
        for waiting, result in zip(rows, ran.value, strict=True):
            if waiting.done.done():
                continue
            if isinstance(result, Exception):
                waiting.done.set_exception(result)
            else:
                queued = ran.queue_seconds + rows[0].since - waiting.since
                waiting.done.set_result(Timed(result, queued, ran.compute_seconds, len(rows)))

    async def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Waits for the running step and ends the thread; `stuck`, and the thread left alone, if that takes longer.

        A step that was abandoned is not waited for.
        """
        if self._closed:
            return
        self._closed = True
        for waiting in self._ready:
            waiting.done.cancel()
        self._ready.clear()
        last = asyncio.ensure_future(self.on_device(int))
        await asyncio.wait({last}, timeout=0 if self._hung else seconds)
        self.stuck = not last.done()
        if self.stuck:
            last.cancel()
            log.error("the device thread is left alone: its step has not come back")
        self._thread.shutdown(wait=not self.stuck)


def _run_and_tell(rows: list[_Waiting], begun: threading.Lock, tell: Callable[[Timed[Sequence[Any]]], object]) -> None:
    """Runs the rows' step, on the device thread."""
    begun.release()
    ran = _run(rows)
    with contextlib.suppress(RuntimeError):  # a loop that is closed wants to know nothing
        tell(ran)


def _run(rows: list[_Waiting]) -> Timed[Sequence[Any]]:
    """Runs the rows' step, on the device thread; times are those of the first row."""
    began = time.perf_counter()
    try:
        results = rows[0].step([r.row for r in rows])
    except Exception as error:
        results = [DeviceLost(f"{type(error).__name__}: {error}")] * len(rows)
    return Timed(results, began - rows[0].since, time.perf_counter() - began)
