"""Limits proposal sessions, which need no KV slot with n-gram lookup."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

from tandem.services.duplex import StreamIdle
from tandem.services.security.identity import ANONYMOUS
from tandem.services.security.limits import LimitReached, ServerLimits

BYTES_PER_TOKEN = 1024  # of a session: the lookup index, measured


class ProposalSessions:
    """Counts and limits open sessions and bytes per caller; totals are metrics."""

    def __init__(self, limits: ServerLimits) -> None:
        self._most = {
            "max_proposal_sessions": limits.max_proposal_sessions,
            "max_proposal_bytes": limits.max_proposal_bytes,
        }
        self._held: dict[str, Counter[str]] = {name: Counter() for name in self._most}
        self._together = Counter[str]()
        self.opened = self.closed = self.expired = 0

    def __len__(self) -> int:
        return self._together["max_proposal_sessions"]

    def owned_by(self, identity: str) -> int:
        return self._held["max_proposal_sessions"][identity]

    @contextlib.contextmanager
    def one(self, identity: str) -> Iterator[None]:
        """Counts a session while the block runs. Raises LimitReached."""
        self._add("max_proposal_sessions", identity, 1)
        self.opened += 1
        try:
            yield
            self.closed += 1
        except BaseException as error:
            idle = isinstance(error, StreamIdle)
            self.expired, self.closed = self.expired + idle, self.closed + (not idle)
            raise
        finally:
            self._add("max_proposal_sessions", identity, -1)

    def grow(self, identity: str, tokens: int) -> None:
        """Adds `tokens` (may be negative) to a session. Raises LimitReached."""
        self._add("max_proposal_bytes", identity, tokens * BYTES_PER_TOKEN)

    def _add(self, name: str, identity: str, more: int) -> None:
        held, most = self._held[name], self._most[name]
        if more > 0:
            own = most if identity == ANONYMOUS else max(1, most // 2)
            for who, now, limit in (("your", held[identity], own), ("all", self._together[name], most)):
                if now + more > limit:
                    raise LimitReached(
                        f"{name}: {who} proposal sessions use {now} of {limit}: there is no room for {more} more"
                    )
        held[identity] += more
        self._together[name] += more
        if not held[identity]:
            del held[identity]
