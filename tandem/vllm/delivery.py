"""Delivers drafts to steps: the engine's thread calls `begin` and `end`, the rest runs on the loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tandem.vllm.rows import Row
from tandem.vllm.sessions import RowSession
from tandem.vllm.workers import Workers

OnLoop = Callable[..., None]  # runs a function on the event loop, from another thread


class RowUpdate(NamedTuple):
    """A row and the tokens its session lacks."""

    row: Row
    new: Sequence[int]


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
    """Rows' sessions; a step may wait `budget_seconds` for its drafts of `k` tokens."""

    def __init__(self, workers: Workers, k: int, budget_seconds: float, soon: OnLoop) -> None:
        self._workers, self._k, self._budget, self._soon = workers, k, budget_seconds, soon
        self._closing: set[asyncio.Task[None]] = set()
        self._step = 0

    def begin(self, rows: Sequence[Row]) -> Arrivals:
        self._step += 1
        updates = [RowUpdate(row, row.take_new()) for row in rows]
        waiting = [row for row in rows if self._waits(row)]
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

    def _waits(self, row: Row) -> bool:
        session: RowSession | None = row.session
        return not row.draft(1) and (session is None or (session.worker.patient and session.following))

    def _follow(self, updates: Sequence[RowUpdate], arrivals: Arrivals, step: int) -> None:
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
