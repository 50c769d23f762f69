"""The two forms in which drafts come to a step. `begin` is called by the engine's thread, the rest runs on the loop."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tandem.vllm.rows import Held, Row
from tandem.vllm.sessions import Asked, Session, Streamed
from tandem.vllm.workers import Seen, Workers

log = logging.getLogger("tandem.vllm")

LATE_LENGTHS = 3
"""How many times as long a draft is that the step will not wait for: its first tokens will be known when it comes."""

OnLoop = Callable[..., None]
"""Calls a function on the event loop, from another thread."""


class Told(NamedTuple):
    """What a step made of a row: `new` tokens, after `offered` drafts of the session were verified. `all`: all of its
    tokens, where the form needs them."""

    row: Row
    new: Sequence[int]
    offered: int
    all: Sequence[int] = ()


class Arrivals:
    """Counts the answers that a step waits for."""

    def __init__(self, rows: set[int]) -> None:
        self._left, self._done = rows, threading.Event()
        if not rows:
            self._done.set()

    def came(self, row: Row) -> None:
        self._left.discard(id(row))
        if not self._left:
            self._done.set()

    def wait(self, seconds: float) -> bool:
        """Waits for them, and returns whether all came."""
        return self._done.wait(max(0.0, seconds))


class Forms:
    """Sessions of rows at workers, and their end. A row keeps the form that it began with."""

    def __init__(self, workers: Workers, k: int, budget_seconds: float, soon: OnLoop) -> None:
        self._workers, self._k, self._budget, self._soon = workers, k, budget_seconds, soon
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._step = 0

    def begin(self, rows: Sequence[Row], seen: Seen) -> Arrivals:
        """Lets the workers draft for these rows, and returns what the step may wait for."""
        self._step += 1
        told = [self._told(row) for row in rows]
        asked = [one for one in told if not one.row.streams and not one.row.asking]
        wanting = {id(one.row) for one in asked if self._waits(one.row)}
        opened = {id(one.row) for one in asked if id(one.row) in wanting and one.row.session is not None}
        arrivals = Arrivals(
            set(opened or wanting)
        )  # a prompt that is new to its worker takes long, and others do not wait
        for one in asked:
            one.row.asking = True
        self._soon(self._follow, told, asked, wanting, seen, arrivals, self._step)
        return arrivals

    def end(self, rows: Sequence[Row]) -> None:
        """Ends the sessions of rows that have left. May be called by any thread."""
        for row in rows:
            row.left = True
        if rows:
            self._soon(self._end, rows)

    async def close(self) -> None:
        """Ends what is under way, and waits until the sessions are closed."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, *self._closing, return_exceptions=True)

    def _told(self, row: Row) -> Told:
        new, row.told = row.tokens[row.told :], len(row.tokens)
        offered = row.offered if row.source in ("arrived", "late") else 0
        whole = () if row.streams or row.asking else list(row.tokens)
        return Told(row, new, offered, whole)

    def _waits(self, row: Row) -> bool:
        """Returns whether the step waits for a row: it has no draft that fits, and its worker may answer in time."""
        session: Session | None = row.session
        return not row.draft(1) and (session is None or session.worker.patient)

    def _follow(
        self, told: Sequence[Told], asked: Sequence[Told], wanting: set[int], seen: Seen, arrivals: Arrivals, step: int
    ) -> None:
        for one in told:
            session: Session | None = one.row.session
            if session is not None and not one.row.left:
                session.stepped(one.new, one.offered, seen)
            if one.row.streams and not one.row.left:
                self._stream(one)
        for one in asked:
            k = self._k if id(one.row) in wanting else LATE_LENGTHS * self._k
            task = asyncio.create_task(self._ask(one, k, step), name="ask for a draft")
            one.row.call = task
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            task.add_done_callback(lambda _, row=one.row: _asked(row, arrivals))  # type: ignore[misc]

    async def _ask(self, one: Told, k: int, step: int) -> None:
        row, began = one.row, time.monotonic()
        if row.left:
            return
        session = row.session
        worker = self._workers.for_row(session.worker if session else None)
        if not isinstance(session, Asked) or session.worker is not worker:
            self._close(session)
            session = row.session = Asked(worker)
        opened = session.opened
        draft = await session.propose(one.all, k)
        if draft.token_ids:
            row.held = Held(len(one.all), draft.token_ids)
            if opened:
                worker.answered(time.monotonic() - began <= self._budget, step)

    def _stream(self, one: Told) -> None:
        """Opens a row's stream, or opens it anew where its worker has failed and another has not."""
        session = one.row.session
        worker = self._workers.for_row(session.worker if session else None)
        if session is None:
            one.row.session = Streamed(worker, one.row, one.new)
        elif session.worker is not worker:
            self._close(session)
            one.row.session = Streamed(worker, one.row, session.ahead.known)

    def _end(self, rows: Sequence[Row]) -> None:
        for row in rows:
            session, row.session = row.session, None
            self._close(session, row.call)

    def _close(self, session: Session | None, call: asyncio.Task[None] | None = None) -> None:
        """Closes a session in the background, once its call has been cancelled: it would be opened by it again."""

        async def close(session: Session) -> None:
            if call is not None:
                call.cancel()
                await asyncio.gather(call, return_exceptions=True)
            await session.close()

        if session is not None:
            task = asyncio.create_task(close(session), name="end a session of drafts")
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)


def _asked(row: Row, arrivals: Arrivals) -> None:
    row.asking = False
    arrivals.came(row)
