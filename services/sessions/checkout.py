"""Who uses a session, and when what it holds is given back: on every path, and never while somebody works with it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Protocol, TypeVar

from tandem.services.sessions.table import Session, SessionKey, SessionTable


class Resources(Protocol):
    """What a session holds. `lock` keeps its calls in order; `opened`: one of them got through."""

    lock: asyncio.Lock
    opened: bool


Held = TypeVar("Held", bound=Resources)
Reply = TypeVar("Reply")
_AFTER_SECONDS = 0.002  # a lease that ends just now has not run out

Free = Callable[[Session[Held, Reply]], Awaitable[None]]


@contextlib.asynccontextmanager
async def using(
    table: SessionTable[Held, Reply], session: Session[Held, Reply], free: Free[Held, Reply]
) -> AsyncGenerator[None, None]:
    """The session to ourselves. Its lease is renewed at the end. Raises SessionNotFound if it was closed meanwhile.

    A session that was closed meanwhile, or whose first call failed, is freed by its last user.
    """
    session.in_use += 1
    try:
        async with session.held.lock:
            table.touch(session.session_id, session)
            yield
            session.held.opened = True
    finally:
        here = table.find(session.session_id) is session
        if here and session.held.opened:
            table.touch(session.session_id)  # while it is in use it has not run out, however long this took
        session.in_use -= 1
        if not session.in_use and not (here and session.held.opened):
            if here:
                table.forget(session.session_id)
            await free(session)


async def drop(table: SessionTable[Held, Reply], session_id: SessionKey, free: Free[Held, Reply]) -> bool:
    """Ends a session; whether it was there. Its last user frees it, if it is in use. Its id is used up in any case."""
    session = table.drop(session_id)
    if session is not None and not session.in_use:
        await free(session)
    return session is not None


async def expire(table: SessionTable[Held, Reply], free: Free[Held, Reply]) -> None:
    """Frees the sessions whose lease has run out, now: before a server says that it is full."""
    for session in table.expire():
        await free(session)


async def expire_forever(table: SessionTable[Held, Reply], free: Free[Held, Reply]) -> None:
    """Frees every session as its lease runs out. Runs until cancelled."""
    while True:
        await asyncio.sleep(table.seconds_to_expiry() + _AFTER_SECONDS)
        await expire(table, free)
