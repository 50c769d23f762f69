"""Serializes calls on a session; the last user frees its resources, on every path."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Protocol, TypeVar

from tandem.services.sessions.table import Session, SessionKey, SessionTable


class SessionResources(Protocol):
    """Resources of a session. `lock` serializes its calls; `opened`: at least one call succeeded."""

    lock: asyncio.Lock
    opened: bool


Resources = TypeVar("Resources", bound=SessionResources)
Reply = TypeVar("Reply")
_AFTER_SECONDS = 0.002  # a lease that ends exactly now has not expired yet

Free = Callable[[Session[Resources, Reply]], Awaitable[None]]


@contextlib.asynccontextmanager
async def using(
    table: SessionTable[Resources, Reply], session: Session[Resources, Reply], free: Free[Resources, Reply]
) -> AsyncGenerator[None, None]:
    """Locks the session for one call and renews its lease at the end. Raises SessionNotFound if it has been closed.

    The last user frees a session that was closed in the meantime or whose first call failed.
    """
    session.in_use += 1
    try:
        async with session.resources.lock:
            table.touch(session.session_id, session)
            yield
            session.resources.opened = True
    finally:
        listed = table.find(session.session_id) is session
        if listed and session.resources.opened:
            table.touch(session.session_id)  # a session in use does not expire, however long the call took
        session.in_use -= 1
        if not session.in_use and not (listed and session.resources.opened):
            if listed:
                table.forget(session.session_id)
            await free(session)


async def drop(table: SessionTable[Resources, Reply], session_id: SessionKey, free: Free[Resources, Reply]) -> bool:
    """Closes a session and returns whether it existed. If it is in use, its last user frees it. The id stays used."""
    session = table.drop(session_id)
    if session is not None and not session.in_use:
        await free(session)
    return session is not None


async def expire(table: SessionTable[Resources, Reply], free: Free[Resources, Reply]) -> None:
    """Frees the sessions whose lease has expired. Called before a server reports that it is full."""
    for session in table.expire():
        await free(session)


async def expire_forever(table: SessionTable[Resources, Reply], free: Free[Resources, Reply]) -> None:
    """Frees every session when its lease expires. Runs until cancelled."""
    while True:
        await asyncio.sleep(table.seconds_to_expiry() + _AFTER_SECONDS)
        await expire(table, free)
