"""The session table as a state machine against a model that keeps the whole history. The clock is ours.

The model says what a session holds (its rounds, each with base and reply) and when its lease ends; after every step the
table must agree. What a target would commit after so many tokens is arithmetic, as with any seeded draw.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tandem.services.sessions.table import (
    REMEMBERED,
    Fence,
    Session,
    SessionConflict,
    SessionExpired,
    SessionNotFound,
    SessionTable,
)
from tandem.speculation.types import Request, SamplingParams

GREEDY, SEEDED = SamplingParams(), SamplingParams(temperature=1.0, seed=7)
LEASE = 10.0
NAMES = st.sampled_from([*"abcdefgh"])


def said(length: int) -> int:
    """The target's token at a position, whoever asks and how often."""
    return (length * 7 + 3) % 101


def truth(length: int) -> list[int]:
    return [said(n) for n in range(length)]


def a_session(name: Any, tokens: list[int]) -> Session:
    sequence: Any = f"slot of {name}"
    return Session(name, sequence, Request(GREEDY), tokens, 1000)


@dataclass
class Expected:
    """What the model knows of one open session."""

    length: int
    expires: float
    users: int = 0
    last: tuple[int, str] | None = None  # base and reply of the last round
    replies: dict[int, str] = field(default_factory=dict)


class Sessions(RuleBasedStateMachine):
    """Clients open, verify, repeat, guess wrong, resume, leave, and wait too long, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.table: SessionTable = SessionTable(lambda: self.now, LEASE)
        self.model: dict[str, Expected] = {}
        self.gone: set[str] = set()  # ran out, and collected
        self.closed: set[str] = set()
        self.computed = 0
        self.slots = 0  # held by sessions; whoever removes one gives its slot back

    # --- what clients do ---

    @rule(name=NAMES, length=st.integers(1, 4))
    def open(self, name: str, length: int) -> None:
        """G4: the same call opens and resumes; a prefix of the truth never conflicts."""
        session = self.table.find(name)
        if session is None and name in self.closed:  # an opening that was overtaken
            with pytest.raises(SessionConflict, match="was closed"):
                self.table.admit(a_session(name, truth(length)))
            return
        if session is None:
            self.table.admit(a_session(name, truth(length))).opened = True
            self.slots += 1
            self.model[name] = Expected(length, self.now + LEASE)
            self.gone.discard(name)
            return
        self._resume(name, session, length)

    @rule(name=NAMES, back=st.integers(0, 3), beyond=st.integers(0, 2))
    def resume(self, name: str, back: int, beyond: int) -> None:
        """G4: with less than is committed, with all of it, or with more that another server committed."""
        session = self.table.find(name)
        if session is not None:
            self._resume(name, session, max(1, self.model[name].length - back) + beyond)

    def _resume(self, name: str, session: Session, length: int) -> None:
        known = self.model[name]
        session.in_use += 1  # as Checkout does: a session that is found and used has not run out
        self.table.touch(name, session)
        known.expires = self.now + LEASE
        session.resume(truth(length), Request(GREEDY))
        session.in_use -= 1
        lost_reply = known.last is not None and length == known.last[0]
        if length != known.length and not lost_reply:
            known.length, known.last = length, None

    @rule(name=NAMES, sampled=st.booleans())
    def conflict(self, name: str, sampled: bool) -> None:
        """G4: same id and another prefix, or other sampling: refused, and nothing changes."""
        session = self.table.find(name)
        if session is None:
            return
        other = truth(2) if sampled else [said(0) + 1]
        with pytest.raises(SessionConflict):
            session.resume(other, Request(SEEDED if sampled else GREEDY))
        with pytest.raises(SessionConflict):
            self.table.admit(a_session(name, other))

    @rule(name=NAMES, back=st.integers(0, 4), count=st.integers(1, 4), wrong=st.booleans(), lost=st.booleans())
    def verify(self, name: str, back: int, count: int, wrong: bool, lost: bool) -> None:
        """G2: at the committed length apply, at the last base the recorded reply, all else stale. `lost`: cancelled in
        the middle of its step, so that it was computed and not committed."""
        known = self.model.get(name)
        try:
            session = self.table.touch(name)
        except SessionNotFound as error:
            assert known is None or known.expires < self.now
            assert isinstance(error, SessionExpired) == (known is not None or name in self.gone)  # G5
            return
        assert known is not None and (known.expires >= self.now or known.users)
        known.expires = self.now + LEASE
        base = known.length - back if back < 4 else known.length + 1
        last_token = said(base - 1) + wrong
        fence = session.fence(base, last_token)
        if wrong or base < 1 or base > known.length:
            assert fence is Fence.STALE
        elif base == known.length:
            assert fence is Fence.APPLY
            self.computed += 1
            if not lost:
                reply = f"round {self.computed}"
                session.commit(tuple(said(base + i) for i in range(count)), reply)
                known.length, known.last = base + count, (base, reply)
        elif known.last and base == known.last[0]:
            assert fence is Fence.REPLAY
            assert session.recorded == known.last[1]  # G2: first commit wins
        else:
            assert fence is Fence.STALE

    @rule(name=NAMES)
    def close(self, name: str) -> None:
        """G7: freed once, by whoever removed it; again is no error."""
        session = self.table.drop(name)
        assert (session is None) == (name not in self.model)
        self.closed.add(name)
        self.gone.discard(name)
        if session is not None:
            self.slots -= 1
            del self.model[name]
            assert self.table.drop(name) is None

    # --- what the server does meanwhile ---

    @rule(name=NAMES)
    def begin_a_step(self, name: str) -> None:
        """A round, or a prefill, that takes its time."""
        session = self.table.find(name)
        if session is not None and not session.in_use and session.expires >= self.now:
            session.in_use, self.model[name].users = 1, 1

    @rule(name=NAMES)
    def end_a_step(self, name: str) -> None:
        session = self.table.find(name)
        if session is not None and session.in_use:
            self.table.touch(name, session)
            session.in_use, self.model[name].users = 0, 0
            self.model[name].expires = self.now + LEASE

    @rule(seconds=st.sampled_from([0.5, 3.0, LEASE, LEASE + 0.001]))
    def wait(self, seconds: float) -> None:
        """G5: nobody runs out earlier than the table says."""
        quiet, before = self.table.seconds_to_expiry(), self._out()
        self.now += min(seconds, quiet)
        assert self._out() == before
        self.now += max(0.0, seconds - quiet)

    def _out(self) -> set[str]:
        return {name for name, known in self.model.items() if known.expires < self.now and not known.users}

    @precondition(lambda self: self.model)
    @rule()
    def expire(self) -> None:
        """G5: exactly those whose lease ran out while nobody used them, each once."""
        out = self._out()
        gone = self.table.expire()
        assert {s.session_id for s in gone} == out and len(gone) == len(out)
        assert self.table.expire() == []
        for name in out:
            del self.model[name]
        self.gone |= out
        self.slots -= len(gone)

    # --- what always holds ---

    @invariant()
    def tokens_are_the_targets_own(self) -> None:
        """G1, G2: whatever was repeated, lost, late or guessed, what is committed is one clean run."""
        for session in self.table:
            assert session.tokens == truth(self.model[session.session_id].length)

    @invariant()
    def the_record_is_the_last_rounds(self) -> None:
        """G2, G3: and its reply is there for as long as it is the last."""
        for session in self.table:
            last = self.model[session.session_id].last
            assert (session.recorded_base, session.recorded) == (last or (-1, None))

    @invariant()
    def every_session_holds_one_slot(self) -> None:
        """G6: no slot is lost or lent twice."""
        assert len(self.table) == len(self.model) == self.slots
        assert {s.session_id for s in self.table} == set(self.model)

    @invariant()
    def leases_are_as_granted(self) -> None:
        """G5."""
        for session in self.table:
            assert session.expires == self.model[session.session_id].expires


def examples(count: int) -> settings:
    return settings(derandomize=True, database=None, deadline=None, max_examples=count, stateful_step_count=40)


class TestSessions(Sessions.TestCase):  # type: ignore[misc]
    settings = examples(50)


@pytest.mark.thorough
class TestMoreSessions(Sessions.TestCase):  # type: ignore[misc]
    settings = examples(150)


def table() -> tuple[list[float], SessionTable]:
    """A clock, and a table that goes by it."""
    clock = [100.0]
    return clock, SessionTable(lambda: clock[0], LEASE)


def admit(sessions: SessionTable, name: str = "a", tokens: tuple[int, ...] = (1, 2, 3)) -> Session:
    session = sessions.admit(a_session(name, list(tokens)))
    session.opened = True  # as Checkout does
    return session


def test_a_call_of_an_earlier_session_does_not_go_on_with_a_later_one_of_its_id() -> None:
    """It waited for its turn while the session was lost and opened again: the tokens are another's."""
    clock, sessions = table()
    first = admit(sessions)
    assert sessions.touch("a", first) is first
    clock[0] += 11
    assert sessions.expire() == [first]
    later = admit(sessions, tokens=(9,))
    with pytest.raises(SessionNotFound):
        sessions.touch("a", first)
    assert sessions.touch("a", later) is later


def test_only_so_many_expired_ids_are_remembered() -> None:
    clock, sessions = table()
    for i in range(REMEMBERED + 3):
        admit(sessions, f"s{i}")
    clock[0] += 11
    assert len(sessions.expire()) == REMEMBERED + 3
    for name, remembered in (("s0", False), ("s2", False), ("s3", True)):
        with pytest.raises(SessionNotFound) as caught:
            sessions.touch(name)
        assert isinstance(caught.value, SessionExpired) == remembered


@pytest.mark.parametrize("lease", [0, -1])
def test_a_lease_must_last(lease: float) -> None:
    with pytest.raises(ValueError, match="lease_seconds"):
        SessionTable(lambda: 0.0, lease)
