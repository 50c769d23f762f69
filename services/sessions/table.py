"""The session table; the clock is an argument. base_length identifies a round, as each commits a token or more."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakValueDictionary

from tandem.services.security.limits import check_name
from tandem.speculation.types import Request, SpeculationStats
from tandem.v1 import target_verifier_pb2 as pb

if TYPE_CHECKING:
    from tandem.engine.sequences import TargetSequence
    from tandem.services.verify_runs import Run

log = logging.getLogger("tandem.server")

MAX_SESSION_ID = 128
REMEMBERED = 4096  # ended ids kept, to report expiry and refuse an opening after its close

_AFTER_SECONDS = 0.002  # a lease that ends exactly now has not expired yet
_CLOSED, _EXPIRED = "closed", "expired"
_FIXED: dict[str, Callable[[Request], str]] = {
    "sampling": lambda open: "other sampling parameters",
    "rule": lambda open: f"the rule {open.rule.value}",
    "adapter": lambda open: f"adapter {open.adapter or 'none'}",
    "features": lambda open: "other features",
    "margins": lambda open: f"report_margins {open.margins}",
    "logprobs": lambda open: f"logprobs {'absent' if open.logprobs is None else open.logprobs}",
}
"""Request fields fixed at opening, with the words of a conflict."""


class SessionNotFound(LookupError):
    """The session was never opened, or was closed."""


class SessionExpired(SessionNotFound):
    """The session's lease ran out."""


class SessionConflict(ValueError):
    """The session exists with another prefix or other parameters."""


class SessionKey(NamedTuple):
    """Id and owner: callers may use the same id."""

    owner: str
    session_id: str

    def __str__(self) -> str:
        return self.session_id


def session_key(owner: str, session_id: str) -> SessionKey:
    """Builds a key. Raises InvalidField."""
    return SessionKey(owner, check_name("session_id", session_id, 1, MAX_SESSION_ID))


class Fence(enum.Enum):
    APPLY = "apply"
    REPLAY = "replay"
    STALE = "stale"


@dataclass(slots=True)
class Session:
    """`opened`: an opening succeeded. `recorded`: the last reply. `steps`: begun. `request_id`: of its opening."""

    session_id: SessionKey
    sequence: TargetSequence
    request: Request
    tokens: list[int]
    max_total_tokens: int
    prompt_length: int = 0
    request_id: str = ""
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    expires: float = 0.0  # set at admission
    opened: bool = False
    in_use: int = 0
    recorded_base: int = -1
    recorded: pb.VerifyResponse | None = None
    run: Run | None = None
    steps: int = 0
    started: float = field(default_factory=time.perf_counter)

    def end_run(self, error: Exception | None = None) -> None:
        """Ends the run: another call changes the session's tokens."""
        run, self.run = self.run, None
        if run:
            self.sequence.set_stepper(None)
            run.end(error)

    def fence(self, base_length: int, last_token: int) -> Fence:
        """Decides whether a round is next, done, or stale. Raises SessionNotFound if the opening call failed."""
        if not self.opened:
            raise SessionNotFound(f"no session {self.session_id}: its opening failed")
        if not 1 <= base_length <= len(self.tokens) or self.tokens[base_length - 1] != last_token:
            return Fence.STALE
        if base_length == len(self.tokens):
            return Fence.APPLY
        return Fence.REPLAY if base_length == self.recorded_base else Fence.STALE

    def commit(self, tokens: tuple[int, ...], reply: pb.VerifyResponse) -> None:
        """Applies a round and records its reply."""
        self.recorded_base, self.recorded = len(self.tokens), reply
        self.tokens += tokens

    def resume(self, prefix: list[int], request: Request) -> None:
        """Continues from `prefix`; a missing last round stays committed for a replay. Raises SessionConflict."""
        common = min(len(prefix), len(self.tokens))
        if prefix[:common] != self.tokens[:common]:
            raise SessionConflict(f"session {self.session_id} is open with another prefix")
        for name, words in _FIXED.items():
            if getattr(request, name) != getattr(self.request, name):
                raise SessionConflict(f"session {self.session_id} is open with {words(self.request)}")
        if len(prefix) == self.recorded_base and len(prefix) < len(self.tokens):
            return
        if prefix != self.tokens:
            self.tokens = list(prefix)
            self.recorded_base, self.recorded = -1, None


class SessionTable:
    """Sessions by id; each use renews a lease of `lease_seconds`."""

    opened = closed = expired = 0

    def __init__(self, clock: Callable[[], float], lease_seconds: float) -> None:
        if lease_seconds <= 0:
            raise ValueError(f"lease_seconds: {lease_seconds} is not above 0")
        self._clock, self.lease_seconds = clock, lease_seconds
        self._sessions: dict[SessionKey, Session] = {}
        self.on_end: list[Callable[[Session, str], None]] = []  # called with "closed" or "expired"
        self._ended: dict[SessionKey, str] = {}  # how each session ended; oldest first
        self._awaited: WeakValueDictionary[SessionKey, asyncio.Future[None]] = WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    def owned_by(self, owner: str) -> int:
        return sum(session.session_id.owner == owner for session in self)

    def find(self, session_id: SessionKey) -> Session | None:
        return self._sessions.get(session_id)

    def admit(self, session: Session) -> Session:
        """Raises SessionConflict if the id is in use or closed."""
        session_id = session.session_id
        if session_id in self._sessions:
            raise SessionConflict(f"session {session_id} is open")
        self.check_new(session_id)
        session.expires = self._clock() + self.lease_seconds
        self._sessions[session_id] = session
        self.opened += 1
        self._ended.pop(session_id, None)
        if awaited := self._awaited.pop(session_id, None):
            awaited.set_result(None)
        return session

    async def arrival(self, session_id: SessionKey, seconds: float) -> None:
        """Waits up to `seconds` for a session's first admission."""
        admitted = self._awaited.setdefault(session_id, asyncio.get_running_loop().create_future())
        if session_id not in self._sessions and session_id not in self._ended:
            await asyncio.wait((admitted,), timeout=seconds)

    def touch(self, session_id: SessionKey, expected: Session | None = None) -> Session:
        """Renews and returns `expected`, not a later session with its id. Raises SessionNotFound or SessionExpired."""
        session = self._sessions.get(session_id)
        if session is None or session is not (expected or session):
            if session is None and self._ended.get(session_id) == _EXPIRED:
                raise SessionExpired(f"no session {session_id}: its lease expired")
            raise SessionNotFound(f"no session {session_id}: never opened, or closed")
        now = self._clock()
        if self._out(session, now):
            raise SessionExpired(f"no session {session_id}: its lease expired")
        session.expires = now + self.lease_seconds
        return session

    def check_new(self, session_id: SessionKey) -> None:
        # A CloseSession may overtake its own OpenSession.
        if self._ended.get(session_id) == _CLOSED:
            raise SessionConflict(f"session {session_id} was closed: a new session needs a new id")

    def drop(self, session_id: SessionKey) -> Session | None:
        """Closes a session, if open; its id stays used."""
        session = self.forget(session_id)
        self._remember(session_id, _CLOSED)
        return session

    def forget(self, session_id: SessionKey) -> Session | None:
        """Removes a session as if never opened."""
        session = self._sessions.pop(session_id, None)
        if session is not None:
            self.closed += 1
            self._tell_end(session, _CLOSED)
        return session

    def expire(self) -> list[Session]:
        now = self._clock()
        gone = [s for s in self if self._out(s, now)]
        for session in gone:
            del self._sessions[session.session_id]
            self.expired += 1
            self._tell_end(session, _EXPIRED)
            self._remember(session.session_id, _EXPIRED)
        return gone

    def _remember(self, session_id: SessionKey, how: str) -> None:
        self._ended.pop(session_id, None)
        self._ended[session_id] = how
        while len(self._ended) > REMEMBERED:
            del self._ended[next(iter(self._ended))]

    def _tell_end(self, session: Session, how: str) -> None:
        for observe in self.on_end:
            try:
                observe(session, how)
            except Exception:  # who only reports must not keep a session from being freed
                log.exception("the end of session %s was not reported", session.session_id)

    def seconds_to_expiry(self) -> float:
        """Returns seconds to the earliest possible expiry, also of new sessions."""
        now = self._clock()
        return min((max(0.0, s.expires - now) for s in self if not s.in_use), default=self.lease_seconds)

    @staticmethod
    def _out(session: Session, now: float) -> bool:
        return session.expires < now and not session.in_use


class Checkout:
    """Serializes calls on a session; its last user frees it."""

    def __init__(self, table: SessionTable) -> None:
        self._table = table

    @contextlib.asynccontextmanager
    async def using(self, session: Session) -> AsyncGenerator[None, None]:
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
                session.sequence.close()

    def drop(self, session_id: SessionKey) -> bool:
        """Closes a session; returns whether it existed. Its last user frees it. The id stays used."""
        session = self._table.drop(session_id)
        if session is not None and not session.in_use:
            session.sequence.close()
        return session is not None

    def expire(self) -> None:
        """Frees expired sessions; logs errors of single ones. Called before reporting that no slot is free."""
        for session in self._table.expire():
            try:
                session.sequence.close()
            except Exception:
                log.exception("session %s expired, and freeing it failed", session.session_id)

    async def expire_forever(self) -> None:
        while True:
            await asyncio.sleep(self._table.seconds_to_expiry() + _AFTER_SECONDS)
            self.expire()
