"""Decides what a verifier that never waits does next: which draft it verifies, whether it steps plainly, or pauses.

It runs on by itself up to a limit that its client moves: the tokens that the client has not acknowledged are bounded,
so that a client that reads slowly stops the target, and a stop token ends the run. Where no draft continues what is
committed, a copy from the text is verified if it gains more than it costs: it needs no round trip.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tandem.speculation.draft_store import MAX_NODES, DraftStore
from tandem.speculation.lookup_policy import PolicedLookup

MAX_UNREAD = 256
"""Tokens that a run may be ahead of those that its client has acknowledged."""
FED = 16
"""Steps without a draft from the client after which it is taken to rest."""


@dataclass(frozen=True, slots=True)
class RunMessage:
    """A client's message to a run: a draft after `base_length` tokens ending in `last_token`, and the run's new limits.

    It acknowledges those tokens. The run goes on until `run_until` tokens are committed, prompt included; each of its
    steps verifies at most `most_drafts` draft tokens, or `most_copies` tokens copied from the text.
    """

    base_length: int
    last_token: int
    token_ids: tuple[int, ...]
    run_until: int
    most_drafts: int
    most_copies: int = 0


class RunOn:
    """The run of one session. It ends at one of the tokens `stops`. `lookup`: for copies, opened with `tokens`.

    A device thread may go on with it by itself (`after`); its caller then hears of those steps later, in order.
    """

    def __init__(
        self,
        tokens: Sequence[int],
        stops: Collection[int] = (),
        max_unread: int = MAX_UNREAD,
        most_nodes: int = MAX_NODES,
        lookup: PolicedLookup | None = None,
    ) -> None:
        self._stops, self._max_unread, self._lookup = frozenset(stops), max_unread, lookup
        self._store = DraftStore(tokens, most_nodes)
        self._acknowledged = len(tokens)
        self._until = self._most = self._most_copies = 0
        self._lock = threading.Lock()
        self._decided = deque[tuple[tuple[int, ...], bool]]()  # drafts of steps that the device began; whether copies
        self._unheard = 0  # steps that it has followed and the caller has not
        self._unfed = 0  # steps since the client's last draft
        self.messages = 0
        self.misfits = 0
        """Messages whose drafts extend other tokens than the committed ones."""
        self.stopped = False
        self.copied = False
        """Whether the newest draft is a copy from the text."""

    @property
    def length(self) -> int:
        """Committed tokens, prompt included."""
        return len(self._store.committed)

    def hear(self, message: RunMessage) -> None:
        """Takes a message: stores its drafts and moves the limits."""
        self.messages += 1
        with self._lock:
            self._until, self._most, self._most_copies = message.run_until, message.most_drafts, message.most_copies
            if message.token_ids and message.most_drafts:
                self._unfed = 0
            if self._store.add(message.base_length, message.last_token, message.token_ids):
                self._acknowledged = max(self._acknowledged, message.base_length)
            else:
                self.misfits += 1

    def next_draft(self) -> tuple[int, ...] | None:
        """Returns the draft that the next step verifies, empty for a plain step, or None while the run must pause."""
        with self._lock:
            draft, self.copied = self._decided.popleft() if self._decided else self._decide()
        return draft

    def after(self, token_ids: Sequence[int]) -> tuple[int, ...] | None:
        """Follows a step on the device thread, and returns the next one's draft, which `next_draft` will return too."""
        with self._lock:
            self._advance(token_ids)
            self._unheard += 1
            draft, copied = self._decide()
            if draft is not None:
                self._decided.append((draft, copied))
            return draft

    def _decide(self) -> tuple[tuple[int, ...] | None, bool]:
        room = min(self._until, self._acknowledged + self._max_unread) - self.length
        if self.stopped or room < 1:
            return None, False
        draft, most = self._store.best(min(self._most, room - 1)), min(self._most_copies, room - 1)
        self._unfed += 1
        if draft or not self._lookup or most < 1:
            return draft, False
        draft = self._lookup.copy_alone(self._store.committed, most)
        return draft, bool(draft)

    def fed(self) -> bool:
        """Returns whether the client has drafted lately, so that each step is reported to it at once."""
        return self._unfed <= FED

    def commit(self, token_ids: Sequence[int], drafted: int = 0, seconds: float = 0.0, rows: int = 1) -> None:
        """Follows a step of `rows` rows, which verified `drafted` draft tokens in so many seconds; 0: not known."""
        with self._lock:
            if self._unheard:
                self._unheard -= 1
            else:
                self._advance(token_ids)
            if self._lookup and self._most_copies:
                if seconds > 0:
                    self._lookup.stepped(drafted, seconds, rows)
                self._lookup.learn(self._store.committed)

    def _advance(self, token_ids: Sequence[int]) -> None:
        self._store.advance(token_ids)
        self.heed(token_ids)

    def heed(self, token_ids: Sequence[int]) -> None:
        """Ends the run if one of these committed tokens is a stop: of a step, or of the one before that is replayed."""
        self.stopped = self.stopped or not self._stops.isdisjoint(token_ids)
