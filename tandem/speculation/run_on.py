"""The next step of a verifier that never waits: a draft, a copy, a plain step, or a pause at its client's limits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tandem.speculation.lookup_policy import PolicedLookup
from tandem.speculation.types import MAX_DRAFTED

MAX_UNREAD = 256  # tokens that a run may be ahead of the client's acknowledgement
DRAFTING = 16  # steps without a client's draft after which the client rests


@dataclass(frozen=True, slots=True)
class RunMessage:
    """A client's draft after `base_length` tokens, which it acknowledges, and the run's new limits."""

    base_length: int
    last_token: int
    token_ids: tuple[int, ...]
    run_until: int  # tokens, prompt included
    most_drafts: int  # per step
    most_copies: int = 0  # per step, from the text


class SelfPacedRun:
    """One session's run. Messages come on the event loop; `follow` and `next_draft` may run on the device's thread."""

    def __init__(
        self,
        tokens: Sequence[int],
        stops: Collection[int] = (),
        max_unread: int = MAX_UNREAD,
        lookup: PolicedLookup | None = None,
    ) -> None:
        self._stops, self._max_unread, self._lookup = frozenset(stops), max_unread, lookup
        self.tokens = list(tokens)  # committed
        self._draft: tuple[int, ...] = ()  # continues them
        self._acknowledged = len(tokens)
        self._until = self._most = self._most_copies = 0
        self._lock = threading.Lock()
        self._undrafted = 0  # steps since the client's last draft
        self.news = asyncio.Event()  # a message has come
        self.messages = 0
        self.stopped = False
        self.copied = False  # the newest draft is a copy

    def receive(self, message: RunMessage) -> None:
        self.messages += 1
        with self._lock:
            self._until, self._most, self._most_copies = message.run_until, message.most_drafts, message.most_copies
            if message.token_ids and message.most_drafts:
                self._undrafted = 0
            base = message.base_length
            if 1 <= base <= len(self.tokens) and self.tokens[base - 1] == message.last_token:
                self._acknowledged = max(self._acknowledged, base)
                self._keep(tuple(self.tokens[base:]), message.token_ids)
        self.news.set()

    def _keep(self, late: tuple[int, ...], draft: tuple[int, ...]) -> None:
        """Keeps a draft unless tokens committed meanwhile contradict it, or the kept one begins with it."""
        ahead = draft[len(late) :][:MAX_DRAFTED]
        if draft[: len(late)] == late and self._draft[: len(ahead)] != ahead:
            self._draft = ahead

    @property
    def room(self) -> int:
        """Tokens that may be committed now; below 1: none."""
        return 0 if self.stopped else min(self._until, self._acknowledged + self._max_unread) - len(self.tokens)

    def next_draft(self) -> tuple[int, ...] | None:
        """Returns the next step's draft, empty for a plain step; None: pause."""
        with self._lock:
            if (room := self.room) < 1:
                return None
            draft, most = self._draft[: min(self._most, room - 1)], min(self._most_copies, room - 1)
        self._undrafted += 1
        self.copied = False
        if not draft and self._lookup and most > 0:
            draft = self._lookup.copy_alone(self.tokens, most)
            self.copied = bool(draft)
        return draft

    @property
    def client_is_drafting(self) -> bool:
        return self._most > 0 and self._undrafted <= DRAFTING

    def follow(self, token_ids: Sequence[int]) -> None:
        with self._lock:
            committed, self._draft = self._draft[: len(token_ids)], self._draft[len(token_ids) :]
            if committed != tuple(token_ids):
                self._draft = ()
            self.tokens += token_ids
        self.note_stops(token_ids)

    def stepped(self, drafted: int, seconds: float, rows: int) -> None:
        """Records a step of `rows` rows; this one verified `drafted` draft tokens. 0 seconds: unknown."""
        if self._lookup and self._most_copies and seconds > 0:
            self._lookup.stepped(drafted, seconds, rows)

    def note_stops(self, token_ids: Sequence[int]) -> None:
        self.stopped = self.stopped or not self._stops.isdisjoint(token_ids)
