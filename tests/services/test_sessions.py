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


def table(lease: float = 10.0) -> tuple[SessionTable[str, str], Clock]:
    clock = Clock()
    return SessionTable(clock, lease), clock


def admit(sessions: SessionTable[str, str], name: str = "a", tokens: tuple[int, ...] = (1, 2, 3)) -> Session[str, str]:
    session = sessions.admit(name, f"slot of {name}", Request(GREEDY), list(tokens), 100)
    session.opened = True  # as services/sessions/checkout.py does
    return session


def test_a_prefix_that_lacks_only_the_last_round_leaves_it_committed_and_its_reply_to_be_had() -> None:
    """G2, G4: of a client that lost the reply; first commit wins."""
    session = admit(table()[0])
    session.commit((4, 5), "first")
    session.resume([1, 2, 3], Request(GREEDY))
    assert session.tokens == [1, 2, 3, 4, 5]
    assert session.fence(3, 3) is Fence.REPLAY
    assert session.recorded == "first"


def test_a_lease_runs_out_only_after_its_time_and_every_use_renews_it() -> None:
    sessions, clock = table(lease=10.0)
    admit(sessions, "idle")
    admit(sessions, "used")
    clock.now += 9
    assert sessions.touch("used").resources == "slot of used"
    clock.now += 1
    assert sessions.expire() == []
    clock.now += 0.001
    assert [s.session_id for s in sessions.expire()] == ["idle"]
    clock.now += 8.9
    assert sessions.expire() == []
    clock.now += 0.2
    assert [s.session_id for s in sessions.expire()] == ["used"]
    assert len(sessions) == 0
    for name in ("idle", "used"):
        with pytest.raises(SessionNotFound, match=name):
            sessions.touch(name)


def test_what_ran_out_stays_out_and_is_told_apart_from_what_never_was() -> None:
    """G5: also in the moment before anybody collected it."""
    sessions, clock = table(lease=10.0)
    admit(sessions)
    clock.now += 10.001
    with pytest.raises(SessionExpired, match="its lease expired"):
        sessions.touch("a")
    assert [s.session_id for s in sessions.expire()] == ["a"]
    with pytest.raises(SessionExpired):
        sessions.touch("a")
    with pytest.raises(SessionNotFound, match="never opened") as caught:
        sessions.touch("b")
    assert not isinstance(caught.value, SessionExpired)
    admit(sessions)
    assert sessions.touch("a").tokens == [1, 2, 3]


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


def test_it_says_how_long_nothing_can_run_out() -> None:
    sessions, clock = table(lease=10.0)
    assert sessions.seconds_to_expiry() == 10.0
    admit(sessions, "first")
    clock.now += 4
    second = admit(sessions, "second")
    assert sessions.seconds_to_expiry() == 6.0
    sessions.drop("first")
    assert sessions.seconds_to_expiry() == 10.0
    second.in_use = 1
    clock.now += 40
    assert sessions.seconds_to_expiry() == 10.0
    second.in_use = 0
    assert sessions.seconds_to_expiry() == 0.0


def test_a_session_in_use_never_expires() -> None:
    sessions, clock = table()
    session = admit(sessions)
    session.in_use = 1
    clock.now += 1000
    assert sessions.expire() == []
    session.in_use = 0
    assert sessions.expire() == [session]


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
