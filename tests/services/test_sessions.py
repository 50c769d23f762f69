"""The session table alone: fence, record, lease. The clock is ours."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.services.sessions.table import (
    REMEMBERED,
    Fence,
    Session,
    SessionExpired,
    SessionNotFound,
    SessionTable,
)
from tandem.speculation.types import Request, SamplingParams

GREEDY = SamplingParams()


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def table(lease: float = 10.0) -> tuple[SessionTable, Clock]:
    clock = Clock()
    return SessionTable(clock, lease), clock


def admit(sessions: SessionTable, name: str = "a", tokens: tuple[int, ...] = (1, 2, 3)) -> Session:
    session = sessions.admit(name, f"slot of {name}", Request(GREEDY), list(tokens), 100)
    session.opened = True  # as Checkout does
    return session


def test_a_call_of_an_earlier_session_does_not_go_on_with_a_later_one_of_its_id() -> None:
    """It waited for its turn while the session was lost and opened again: the tokens are another's."""
    sessions, clock = table(lease=10.0)
    first = admit(sessions)
    assert sessions.touch("a", first) is first
    clock.now += 11
    assert sessions.expire() == [first]
    later = admit(sessions, tokens=(9,))
    with pytest.raises(SessionNotFound):
        sessions.touch("a", first)
    assert sessions.touch("a", later) is later


def test_only_so_many_expired_ids_are_remembered() -> None:
    sessions, clock = table(lease=10.0)
    for i in range(REMEMBERED + 3):
        admit(sessions, f"s{i}")
    clock.now += 11
    assert len(sessions.expire()) == REMEMBERED + 3
    for name, remembered in (("s0", False), ("s2", False), ("s3", True)):
        with pytest.raises(SessionNotFound) as caught:
            sessions.touch(name)
        assert isinstance(caught.value, SessionExpired) == remembered


@pytest.mark.parametrize("lease", [0, -1])
def test_a_lease_must_last(lease: float) -> None:
    with pytest.raises(ValueError, match="lease_seconds"):
        table(lease)


@settings(derandomize=True, database=None, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), max_size=30))
def test_whatever_is_repeated_lost_or_late_the_tokens_are_those_of_one_clean_run(calls: list[tuple[int, int]]) -> None:
    """G2, G3. Each call names a round by how far it lies back, and how many tokens it would commit."""
    session = admit(table()[0], tokens=(0,))
    bases = [1]
    for back, count in calls:
        base = bases[max(0, len(bases) - 1 - back)]
        fence = session.fence(base, base - 1)
        if base == bases[-1]:
            assert fence is Fence.APPLY
            session.commit(tuple(range(base, base + count)), f"round {base}")
            bases.append(base + count)
        elif base == bases[-2]:
            assert fence is Fence.REPLAY
            assert session.recorded == f"round {base}"
        else:
            assert fence is Fence.STALE
        assert session.tokens == list(range(len(session.tokens)))
