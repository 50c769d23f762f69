"""Limits the number and the memory of proposal sessions, which need no KV slot if n-gram lookup drafts."""

from __future__ import annotations

from collections import Counter

from tandem.services.security.identity import ANONYMOUS
from tandem.services.security.limits import LimitReached, ServerLimits

BYTES_PER_TOKEN = 1024
"""Memory per token of a session: the index of n-gram lookup, measured."""


class ProposalCounts:
    """Counts each caller's proposal sessions and their bytes, and enforces the limits."""

    def __init__(self, limits: ServerLimits) -> None:
        self._most = {
            "max_proposal_sessions": limits.max_proposal_sessions,
            "max_proposal_bytes": limits.max_proposal_bytes,
        }
        self._held: dict[str, Counter[str]] = {name: Counter() for name in self._most}
        self._together = Counter[str]()

    def open(self, identity: str) -> None:
        """Counts a new session. Raises LimitReached."""
        self._add("max_proposal_sessions", identity, 1)

    def grow(self, identity: str, tokens: int) -> None:
        """Counts `tokens` more (or fewer) tokens in a session. Raises LimitReached."""
        self._add("max_proposal_bytes", identity, tokens * BYTES_PER_TOKEN)

    def close(self, identity: str, tokens: int) -> None:
        """Removes a session of `tokens` tokens."""
        self._add("max_proposal_sessions", identity, -1)
        self.grow(identity, -tokens)

    def _add(self, name: str, identity: str, more: int) -> None:
        held, most = self._held[name], self._most[name]
        if more > 0:
            own = most if identity == ANONYMOUS else max(1, most // 2)
            for whose, now, limit in (("your", held[identity], own), ("all", self._together[name], most)):
                if now + more > limit:
                    raise LimitReached(
                        f"{name}: {whose} proposal sessions use {now} of {limit}: there is no room for {more} more"
                    )
        held[identity] += more
        self._together[name] += more
        if not held[identity]:
            del held[identity]
