"""Batches many requests' rows into shared steps of a device, which one thread runs."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import logging
import statistics
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from tandem.engine.slots import SlotPool
from tandem.engine.stepper import Stepper, Waiting, next_rows
from tandem.runners.protocol import RowFailed
from tandem.speculation.estimate import Line
from tandem.speculation.loop import TOGETHER

log = logging.getLogger("tandem.engine")

Row = TypeVar("Row")
Result = TypeVar("Result")
# Called after a step, for its decoding and for its `prefill` rows: with the first row, their number, the seconds that
# the step's first row waited, and the step's own.
ObserveStep = Callable[[Any, int, float, float], None]

# The next step waits at most this many turns of the event loop for rows that come back through it: an idle turn costs
# microseconds, a half-empty step milliseconds. Once every sequence with a slot has a row, the step begins at once.
_TURNS = 8

# Both threads hold Python's interpreter lock, and the loop's replies (0.4 ms, measured) would delay the next step. So
# the loop waits so long for the device thread to begin, after copying pages, if it must.
_BEGINS = 0.005

CLOSE_SECONDS = 5.0  # wait of `close` for the running step


class DeviceLost(RuntimeError):
    """A whole step failed: the device is at fault, not a row."""


class StepHung(DeviceLost):
    """The running step exceeded its time limit; until it returns the device is not used."""


@dataclass(frozen=True, slots=True)
class TimedResult(Generic[Result]):
    """A row's result, its wait, its step's seconds and rows."""

    value: Result
    queue_seconds: float
    compute_seconds: float
    rows: int = 1
    ended: float = 0.0  # perf_counter


class Batcher:
    """Gathers rows of a step, runs it on the device thread, and distributes the results."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"device-{name}")
        self._ready: list[Waiting] = []
        self._running: list[Waiting] = []  # rows of the running step
        self._unread: deque[tuple[list[Waiting], TimedResult[Sequence[Any]]]] = deque()  # steps that ended before it
        self._between: set[Future[Any]] = set()  # work between steps that has not ended
        self._hung = ""
        self._again: asyncio.Handle | None = None
        self._turns = _TURNS
        self._window = BatchWindow()
        self._context = contextvars.Context()  # empty, so that steps do not run in the context of one request
        self._pools: list[SlotPool] = []
        self.away = 0  # sequences that steps do not wait for
        self._gone = set[Stepper]()  # of further ones
        self._prefilled = False
        self.observe: ObserveStep | None = None
        self.learn: Callable[[type, float], None] | None = None  # called with each step's row type and seconds
        self.came_back: Callable[[DeviceLost | None], None] | None = None
        self.stuck = self._closed = False
        self.hung_steps = 0
        self.steps = 0
        self.rows = 0
        self.failures = 0  # of whole steps; counted on the device thread

    def serves(self, slots: SlotPool) -> None:
        """Registers slots: after a step, their holders are expected back."""
        self._pools.append(slots)

    @property
    def waiting(self) -> int:
        return len(self._ready)

    @property
    def running(self) -> tuple[int, list[Any]]:
        """The number of the running step, and its rows, if any."""
        return self.steps, [waiting.row for waiting in self._running]

    def abandon(self, why: str) -> None:
        """Fails all rows with StepHung until the step returns without error; `came_back` follows any return."""
        self._hung = why
        self.hung_steps += 1
        self._read()
        self._fail([*self._running, *self._ready])
        self._ready.clear()

    def _fail(self, rows: list[Waiting]) -> None:
        for waiting in rows:
            if not waiting.done.done():
                waiting.done.set_exception(StepHung(self._hung))

    def _sequences(self) -> int:
        taken = max((pool.count - pool.free for pool in self._pools), default=sys.maxsize)
        return taken - self.away - sum(stepper.gone for stepper in self._gone)

    async def on_device(self, function: Callable[..., Result], *args: Any) -> Result:
        """Runs `function` on the device thread, between steps."""
        return await asyncio.wrap_future(self._submit(functools.partial(function, *args)))

    def between_steps(self, function: Callable[[], object]) -> None:
        """Like `on_device`, without waiting."""
        with contextlib.suppress(RuntimeError):  # the thread has ended
            self._submit(functools.partial(_logged, function))

    def _submit(self, work: Callable[[], Result]) -> Future[Result]:
        submitted = self._thread.submit(work)
        self._between.add(submitted)
        submitted.add_done_callback(self._between.discard)
        return submitted

    def run(
        self,
        step: Callable[[Sequence[Row]], Sequence[Result | RowFailed]],
        row: Row,
        limit: int,
        size: int = 1,
        prefill: bool = False,
        stepper: Stepper | None = None,
    ) -> asyncio.Future[TimedResult[Result]]:
        """Runs `row` in the next `step` with room for its size under `limit`. Raises RowFailed, StepHung, DeviceLost.

        The device thread begins a `stepper`'s next row while no other row comes, goes or waits. After `prefill` rows
        alone, others come first.
        """
        if self._hung:
            raise StepHung(self._hung)
        future: asyncio.Future[TimedResult[Result]] = asyncio.get_running_loop().create_future()
        now = time.perf_counter()
        self._ready.append(Waiting(step, row, limit, now, prefill, future, stepper, size))
        if not prefill:
            self._window.returned(now, bool(self._running))
        self._begin_if_ready()
        return future

    def _begin_if_ready(self) -> None:
        """Begins a step if the device is free and no missing row is worth waiting for; else tries later."""
        if self._running or not self._ready:
            return
        if self._again:
            self._again.cancel()
            self._again = None
        missing, loop = self._sequences() - len(self._ready), asyncio.get_running_loop()
        if missing > 0 and self._turns:
            self._turns -= 1
            self._again = loop.call_soon(self._begin_if_ready, context=self._context)
        elif missing > 0 and (wait := self._wait_seconds(missing)):
            self._again = loop.call_later(wait, self._begin_if_ready, context=self._context)
        else:
            self._begin()

    def _wait_seconds(self, missing: int) -> float:
        """Returns how long to wait for missing rows; a prefill step does not."""
        first = self._first()
        return 0.0 if first.prefill else self._window.seconds(time.perf_counter(), missing, type(first.row))

    def _begin(self) -> None:
        """Submits the next step's rows; returns once the device thread has begun (see _BEGINS)."""
        self._turns = _TURNS
        self._ready = [r for r in self._ready if not r.done.done()]
        if not self._ready:
            return
        self._running = rows = self._sharing(self._first())
        self._prefilled = rows[0].prefill
        self._ready = [r for r in self._ready if r not in rows]
        begun = threading.Lock()
        begun.acquire()
        self._thread.submit(self._run_and_notify, rows, begun, asyncio.get_running_loop())
        begun.acquire(timeout=_BEGINS)

    def _run_and_notify(self, rows: list[Waiting], begun: threading.Lock, loop: asyncio.AbstractEventLoop) -> None:
        """Runs the rows' step, then their steppers' steps while nothing else is due; results are read together."""
        begun.release()
        notify, notified = functools.partial(loop.call_soon_threadsafe, context=self._context), 0.0
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            while True:
                ran = _run(rows)
                self.failures += any(isinstance(result, DeviceLost) for result in ran.value)
                new = [] if self._hung else next_rows(rows, ran.value, loop)
                gone = [row.stepper for row in rows if row.stepper and row.stepper.gone]
                self._gone = {*gone, *(stepper for stepper in self._gone if stepper.gone)}
                if not new or len(new) + len(gone) < len(rows) or self._decides(new):
                    notify(self._ended, rows, ran, new)
                    return
                self._unread.append((rows, ran))
                self._running = new
                at_once = gone or any(r.stepper and r.stepper.notifies_each_step for r in new)
                if at_once or ran.ended - notified >= TOGETHER:
                    notified = ran.ended
                    notify(self._read)
                rows = new

    def _decides(self, rows: list[Waiting]) -> bool:
        """Whether the event loop decides what runs next: a row joins or is missing, or work waits."""
        return bool(self._ready or self._between or self._hung or self._closed or self._sequences() > len(rows))

    def _read(self) -> None:
        while self._unread:
            self._hand_out(*self._unread.popleft())

    def _ended(self, rows: list[Waiting], ran: TimedResult[Sequence[Any]], new: list[Waiting]) -> None:
        self._read()
        self._running, self._turns = [], _TURNS
        if self._hung:
            self._fail([*rows, *new])
            return self._returned(ran)
        if not rows[0].prefill:
            decoding = sum(not r.prefill for r in rows)
            kind, with_prefill_rows = type(rows[0].row), decoding < len(rows)
            self._window.answered(decoding, time.perf_counter(), ran.compute_seconds, kind, with_prefill_rows)
        self._hand_out(rows, ran)
        for waiting in new:
            self._window.returned(waiting.since, False)
        self._ready += new
        if self._closed:
            self._cancel_ready()
        self._begin_if_ready()

    def _returned(self, ran: TimedResult[Sequence[Any]]) -> None:
        """Handles the return of an abandoned step."""
        self.steps += 1
        failed = next((result for result in ran.value if isinstance(result, DeviceLost)), None)
        if failed is None:
            self._hung, self._window = "", BatchWindow()
        if self.came_back:
            self.came_back(failed)

    def _first(self) -> Waiting:
        """Returns the longest-waiting row; after a prefill step, of the others if any."""
        others = (row for row in self._ready if not row.prefill)
        return next(others, self._ready[0]) if self._prefilled else self._ready[0]

    def _sharing(self, first: Waiting) -> list[Waiting]:
        """Returns the rows that share the step of `first`: those that fit, oldest first, `prefill` rows last."""
        room, found = dict[bool, int](), list[Waiting]()
        for row in sorted((r for r in self._ready if r.step == first.step), key=lambda r: r.prefill):
            left = room.setdefault(row.prefill, row.limit) - row.size
            if left >= 0 and (first.prefill or not (row.prefill and self._prefilled)):
                room[row.prefill] = left
                found.append(row)
        return found

    def _hand_out(self, rows: list[Waiting], ran: TimedResult[Sequence[Any]]) -> None:
        self.steps += 1
        self.rows += len(rows)
        for alike in ([r.row for r in rows if r.prefill == prefill] for prefill in (False, True)):
            if alike and self.learn:
                self.learn(type(alike[0]), ran.compute_seconds)
            if alike and self.observe:
                self.observe(alike[0], len(alike), ran.queue_seconds, ran.compute_seconds)
        # Chunks, which are last, come first: the next step waits for the rows after them.
        for waiting, result in reversed([*zip(rows, ran.value, strict=True)]):
            if waiting.done.done():
                continue
            if isinstance(result, Exception):
                waiting.done.set_exception(result)
                waiting.done.exception()  # the row's result may never be read
            else:
                queued = ran.queue_seconds + rows[0].since - waiting.since
                waiting.done.set_result(TimedResult(result, queued, ran.compute_seconds, len(rows), ran.ended))

    async def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Waits for a running step that was not abandoned, and ends the thread; sets `stuck` after `seconds`."""
        if self._closed:
            return
        self._closed = True
        self._cancel_ready()
        last = asyncio.ensure_future(self.on_device(int))
        await asyncio.wait({last}, timeout=0 if self._hung else seconds)
        self.stuck = not last.done()
        if self.stuck:
            last.cancel()
            log.error("the device thread is left running: its step has not returned")
        self._thread.shutdown(wait=not self.stuck)

    def _cancel_ready(self) -> None:
        for waiting in self._ready:
            waiting.done.cancel()
        self._ready.clear()


def _run(rows: list[Waiting]) -> TimedResult[Sequence[Any]]:
    began = time.perf_counter()
    try:
        results = rows[0].step([r.row for r in rows])
    except Exception as error:
        results = [DeviceLost(f"{type(error).__name__}: {error}")] * len(rows)
    ended = time.perf_counter()
    return TimedResult(results, began - rows[0].since, ended - began, len(rows), ended)


def _logged(function: Callable[[], object]) -> None:
    try:
        function()
    except Exception:
        log.exception("work between steps failed")


KEPT, FEW = 64, 8
SLACK = 2.0  # window in median return times, because the last of several rows takes longer
PAYS = 0.75  # longest window, as a share of the time that sharing a step saves
TRIED = 0.3  # window in step times while fewer than FEW returns are known


class BatchWindow:
    """Tracks a device's last round and usual return times, measured while it is idle or waits."""

    def __init__(self) -> None:
        self._away = 0
        self._ended = self._step = self._window = 0.0
        self._waited = False
        self._returns: deque[float] = deque(maxlen=KEPT)
        self._times = defaultdict[object, Line](partial(Line, 0.0))  # seconds by rows, for each kind of step

    def answered(
        self, rows: int, now: float, seconds: float, kind: object = None, with_prefill_rows: bool = False
    ) -> None:
        """Records the end of a step of `rows` decoding rows. `seconds`: its time, chunks included."""
        self._away, self._ended, self._step, self._waited = rows, now, seconds, False
        if not with_prefill_rows:
            self._times[kind].note(rows, seconds)
        known = len(self._returns) >= FEW
        self._window = SLACK * statistics.median(self._returns) if known else TRIED * seconds

    def returned(self, now: float, busy: bool) -> None:
        """Records a row's return; `busy`: during a step."""
        if not self._away:
            return
        self._away -= 1
        if self._waited or not busy:
            self._returns.append(now - self._ended)

    def seconds(self, now: float, missing: int, kind: object = None) -> float:
        """How much longer a step of this kind waits for `missing` open sequences."""
        if not min(self._away, missing) or self._window > PAYS * self._step * self._times[kind].fixed_share:
            return 0.0
        left = max(0.0, self._ended + self._window - now)
        self._waited |= left > 0
        return left
