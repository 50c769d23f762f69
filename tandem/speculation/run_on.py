"""Decides what a verifier that never waits does next: which draft it verifies, whether it steps plainly, or pauses.

It runs on by itself up to a limit that its client moves: the tokens that the client has not acknowledged are bounded,
so that a client that reads slowly stops the target, and a stop token ends the run. Where no draft continues what is
committed, a copy from the text is verified if it gains more than it costs: it needs no round trip.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tandem.speculation.lookup_policy import PolicedLookup
from tandem.speculation.types import MAX_DRAFTED

MAX_UNREAD = 256
"""Tokens that a run may be ahead of those that its client has acknowledged."""
DRAFTING = 16
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


class SelfPacedRun:
    """The run of one session. It ends at one of the tokens `stops`. `lookup`: for copies, opened with `tokens`.

    Messages come on the event loop; `follow` and `next_draft` may be called on the device's thread.
    """

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
        self.copied = False
        """Whether the newest draft is a copy from the text."""

    def receive(self, message: RunMessage) -> None:
        """Stores a message's drafts and moves the limits."""
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
        """Keeps a new draft unless `late`, committed meanwhile, contradicts it, or the last one begins with it."""
        ahead = draft[len(late) :][:MAX_DRAFTED]
        if draft[: len(late)] == late and self._draft[: len(ahead)] != ahead:
            self._draft = ahead

    def next_draft(self) -> tuple[int, ...] | None:
        """Returns the draft that the next step verifies, empty for a plain step, or None while the run must pause."""
        with self._lock:
            room = min(self._until, self._acknowledged + self._max_unread) - len(self.tokens)
            if self.stopped or room < 1:
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
        """Whether the client has drafted lately, so that each step is reported to it at once."""
        return self._undrafted <= DRAFTING

    def follow(self, token_ids: Sequence[int]) -> None:
        """Takes the tokens that a step committed."""
        with self._lock:
            committed, self._draft = self._draft[: len(token_ids)], self._draft[len(token_ids) :]
            if committed != tuple(token_ids):
                self._draft = ()
            self.tokens += token_ids
        self.note_stops(token_ids)

    def stepped(self, drafted: int, seconds: float, rows: int) -> None:
        """Records a step of `rows` rows, which verified `drafted` draft tokens of this one; 0 seconds: not known."""
        if self._lookup and self._most_copies and seconds > 0:
            self._lookup.stepped(drafted, seconds, rows)

    def note_stops(self, token_ids: Sequence[int]) -> None:
        """Ends the run if a stop is among these tokens, of a step or of a reply that is replayed."""
        self.stopped = self.stopped or not self._stops.isdisjoint(token_ids)
