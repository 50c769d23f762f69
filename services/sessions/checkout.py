"""Serializes calls on a session; its last user frees it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Generic, TypeVar

from tandem.services.sessions.table import Session, SessionKey, SessionTable

log = logging.getLogger("tandem.server")

Resources = TypeVar("Resources")
Reply = TypeVar("Reply")
_AFTER_SECONDS = 0.002  # a lease that ends exactly now has not expired yet


class Checkout(Generic[Resources, Reply]):
    def __init__(
        self, table: SessionTable[Resources, Reply], free: Callable[[Session[Resources, Reply]], Awaitable[None]]
    ) -> None:
        self._table, self._free = table, free

    @contextlib.asynccontextmanager
    async def using(self, session: Session[Resources, Reply]) -> AsyncGenerator[None, None]:
        """Locks a session for one call; the last user frees it. Raises SessionNotFound if closed."""
        table = self._table
        session.in_use += 1
        try:
            async with session.lock:
                table.touch(session.session_id, session)
                yield
                session.opened = True
        finally:
            listed = table.find(session.session_id) is session
            if listed and session.opened:
                table.touch(session.session_id)  # a session in use does not expire, however long the call took
            session.in_use -= 1
            if not session.in_use and not (listed and session.opened):
                if listed:
                    table.forget(session.session_id)
                await self._free(session)

    async def drop(self, session_id: SessionKey) -> bool:
        """Closes a session; returns whether it existed. Its last user frees it. The id stays used."""
        session = self._table.drop(session_id)
        if session is not None and not session.in_use:
            await self._free(session)
        return session is not None

    async def expire(self) -> None:
        """Frees expired sessions; logs errors of single ones. Called before reporting that no slot is free."""
        for session in self._table.expire():
            try:
                await self._free(session)
            except Exception:
                log.exception("session %s expired, and freeing it failed", session.session_id)

    async def expire_forever(self) -> None:
        while True:
            await asyncio.sleep(self._table.seconds_to_expiry() + _AFTER_SECONDS)
            await self.expire()
