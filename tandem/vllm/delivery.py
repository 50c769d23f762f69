"""Delivers drafts to steps: the engine's thread calls `begin` and `end`, the rest runs on the loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence

from tandem.rpc.propose_stream import StreamedDrafts
from tandem.speculation.ahead import DraftingAhead
from tandem.speculation.drafters import NgramDrafter
from tandem.speculation.estimate import Estimate
from tandem.speculation.types import Proposer, Request, SpeculationStats
from tandem.speculation.verification_mode import DraftPlan, LookaheadPolicy
from tandem.vllm.rows import Held, Row
from tandem.vllm.workers import RowWorker, RowWorkers

OnLoop = Callable[..., None]  # runs a function on the event loop, from another thread


class Arrivals:
    def __init__(self, rows: set[int]) -> None:
        self._left, self._done = rows, threading.Event()
        if not rows:
            self._done.set()

    def came(self, row: Row) -> None:
        self._left.discard(id(row))
        if not self._left:
            self._done.set()

    def wait(self, seconds: float) -> bool:
        return self._done.wait(max(0.0, seconds))


class DraftDelivery:
    """Rows' sessions; a step may wait `budget_seconds` for its drafts."""

    def __init__(self, workers: RowWorkers, k: int, budget_seconds: float, soon: OnLoop) -> None:
        self._workers, self._k, self._budget, self._soon = workers, k, budget_seconds, soon
        self._closing: set[asyncio.Task[None]] = set()
        self._step = 0

    def begin(self, rows: Sequence[Row]) -> Arrivals:
        self._step += 1
        updates = [(row, row.take_new()) for row in rows]  # with the tokens that their sessions lack
        sessions = [(row, row.session) for row in rows if not row.draft(1)]
        waiting = [row for row, its in sessions if its is None or (its.worker.patient and its.following)]
        # A prompt that is new to its worker takes long, and others do not wait for it.
        opened = [row for row in waiting if row.session is not None]
        arrivals = Arrivals({id(row) for row in opened or waiting} if self._budget else set())
        self._soon(self._follow, updates, arrivals, self._step)
        return arrivals

    def end(self, rows: Sequence[Row]) -> None:
        """Ends the sessions of rows that left, from any thread."""
        for row in rows:
            row.left = True
        if rows:
            self._soon(self._end, rows)

    async def close(self) -> None:
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _follow(self, updates: Sequence[tuple[Row, Sequence[int]]], arrivals: Arrivals, step: int) -> None:
        for row, new in updates:
            if row.left:
                continue
            session: RowSession | None = row.session
            worker = self._workers.for_row(session.worker if session else None)
            if session is None or session.worker is not worker:
                known = [*session.known, *new] if session else list(new)
                self._close(session)
                row.session = session = RowSession(worker, row, known, self._k, self._budget)
                session.awaited = arrivals
            else:
                session.stepped(new, arrivals, step)
            if not session.following:
                arrivals.came(row)

    def _end(self, rows: Sequence[Row]) -> None:
        for row in rows:
            session, row.session = row.session, None
            self._close(session)

    def _close(self, session: RowSession | None) -> None:
        if session is not None:
            task = asyncio.create_task(session.close(), name="end a session of drafts")
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)


GREEDY = Request()  # vLLM takes drafts as certain: propose the likeliest tokens
AHEAD_LENGTHS = 3  # of a step's draft: a late draft's first tokens are known


class RowSession(DraftingAhead):
    """Follows `row` from its `known` tokens; drafts go to `row.held`, of which steps verify `k` tokens."""

    def __init__(self, worker: RowWorker, row: Row, known: list[int], k: int, budget_seconds: float) -> None:
        plan, end = DraftPlan(AHEAD_LENGTHS * k, k, k), worker.target.max_sequence_length
        given, stats, unused = LookaheadPolicy(k, Estimate(), given=plan), SpeculationStats(), NgramDrafter()
        super().__init__(unused, given, lambda message: None, stats, known, end, k, drafts_here=False)
        self.worker = worker
        self.awaited: Arrivals | None = None
        self._row, self._budget = row, budget_seconds
        self._step, self._length, self._stepped_at = 0, 0, 0.0  # of the oldest unanswered step but the first
        self._drafts = StreamedDrafts(worker, GREEDY, worker.target.vocab_size, stats)
        following = self._drafts.run(self, len(known), self._came)
        self._task = asyncio.create_task(following, name="follow a row")
        worker.sessions += 1

    @property
    def following(self) -> bool:
        return self._drafts.following

    def stepped(self, new: Sequence[int], arrivals: Arrivals, step: int) -> None:
        self.awaited = arrivals
        self.known += new
        if self._step and time.monotonic() - self._stepped_at > self._budget:
            self._answered()
        if not self._step:
            self._step, self._length, self._stepped_at = step, len(self.known), time.monotonic()
        if self.heard:
            self.heard()

    def adopt(self, base: int, token_ids: Sequence[int], proposed_by: Sequence[Proposer] = ()) -> None:
        """Holds a draft that extends the first `base` tokens."""
        self._row.held = Held(base, tuple(token_ids))
        if self._step and base >= self._length:
            self._answered()
        if base == len(self.known):
            self._came()

    async def close(self) -> None:
        self.worker.sessions -= 1
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def _answered(self) -> None:
        self.worker.answered(time.monotonic() - self._stepped_at <= self._budget, self._step)
        self._step = 0

    def _came(self) -> None:
        if self.awaited:
            self.awaited.came(self._row)
