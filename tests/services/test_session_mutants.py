"""What keeps sessions apart, bounded and closed, taken away piece by piece: a test here must notice each time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest

from tests.engine import test_slots
from tests.reliability import test_cancellation
from tests.reliability.mutants import Mutant, planted
from tests.rpc import test_closing
from tests.services import test_openings, test_proposal_limits, test_sessions, test_target_verifier


@dataclass(frozen=True)
class Caught:
    """A mutant (no case of the conformance suite and no schedule is about it) and the test that fails for it."""

    mutant: Mutant
    by: Callable[[], None]


def caught(name: str, where: str, old: str, new: str, by: Callable[[], None]) -> Caught:
    return Caught(Mutant(name, where, old, new, ()), by)


CLOSES = "tandem.rpc.closing:SessionCloses._until_answered"

MUTANTS = (
    caught(
        "touch accepts a later session of the same id",
        "tandem.services.sessions.table:SessionTable.touch",
        "if session is None or session is not (expected or session):",
        "if session is None:",
        test_sessions.test_a_call_of_an_earlier_session_does_not_go_on_with_a_later_one_of_its_id,
    ),
    caught(
        "a round may exceed the total by one",
        "tandem.services.target_verifier:TargetVerifierService._check_draft",
        "+ drafted + 1 > session.max_total_tokens:",
        "+ drafted > session.max_total_tokens:",
        partial(test_target_verifier.test_a_round_may_fill_the_total_that_was_asked_for_and_not_exceed_it_by_one, 2),
    ),
    caught(
        "a second cancellation ends the cleaning up",
        "tandem.speculation.loop:speculate",
        "await finish(_clean_up(rounds, under_way))",
        "await (under_way.cancel() if under_way else asyncio.sleep(0)); await rounds.close()",
        partial(
            test_cancellation.test_cancelled_anywhere_and_in_any_manner_nothing_stays,
            test_cancellation.fused,
            {"again": 1},
        ),
    ),
    caught(
        "a closed id can be opened again",
        "tandem.services.sessions.table:SessionTable.check_new",
        "if self._ended.get(session_id) == _CLOSED:",
        "if False:",
        test_closing.test_an_opening_that_its_close_overtook_opens_nothing,
    ),
    caught(
        "ids of any length are remembered",
        "tandem.services.sessions.table:session_key",
        'check_name("session_id", session_id, 1, MAX_SESSION_ID)',
        "session_id",
        test_closing.test_an_opening_that_its_close_overtook_opens_nothing,
    ),
    caught(
        "a close that fails is not made again",
        CLOSES,
        "if error.outcome not in WORTH_REPEATING:",
        "if True:",
        partial(test_closing.test_a_session_whose_close_fails_is_closed_by_a_later_one, False),
    ),
    caught(
        "a close that is refused is made again",
        CLOSES,
        "if error.outcome not in WORTH_REPEATING:",
        "if False:",
        test_closing.test_a_close_is_not_made_again_where_it_was_refused_and_not_for_ever,
    ),
    caught(
        "who moves on leaves its session open",
        "tandem.rpc.remote_session:RemoteSession._open",
        "self._end_at(other, self._session_ids.pop(other))",
        "self._session_ids.pop(other)",
        partial(
            test_closing.test_a_request_that_moved_on_leaves_no_session_at_the_verifier_it_left,
            test_closing.Pipeline.OFF,
        ),
    ),
    caught(
        "an opening never waits",
        "tandem.services.target_verifier:TargetVerifierService._admitted",
        "length, seconds, key)",
        "length, 0.0)",
        partial(test_openings.test_openings_are_not_starved_by_callers_that_generate_without_a_pause, 30.0),
    ),
    caught(
        "an opening is checked only before it waits",
        "tandem.services.target_verifier:TargetVerifierService._admitted",
        "self._check_new(key)\n        resources",
        "resources",
        test_openings.test_a_server_that_began_to_drain_meanwhile_opens_nothing,
    ),
    caught(
        "who comes back has lost its place",
        "tandem.engine.slots:SlotPool._place",
        "return next(kept, None) or _Place(",
        "return _Place(",
        test_openings.test_who_waited_in_vain_and_comes_back_has_kept_its_place_and_who_stays_away_has_not,
    ),
    caught(
        "a slot that was handed to a cancelled waiter is lost",
        "tandem.engine.slots:SlotPool._turn",
        "self.release(turn.result())",
        "pass",
        test_slots.test_a_waiter_cancelled_in_the_turn_it_is_served_gives_its_slot_on,
    ),
    caught(
        "what a session of proposals held stays counted",
        "tandem.services.sessions.proposals:Proposals._free",
        "self._proposed.close(session.session_id.owner, session.resources.counted)",
        "pass",
        test_proposal_limits.test_what_a_lease_or_a_failed_first_call_gives_back_is_counted_once,
    ),
    caught(
        "sessions of proposals are counted, and not bounded",
        "tandem.services.sessions.proposal_limits:ProposalCounts._add",
        "if now + more > limit:",
        "if False:",
        test_proposal_limits.test_lookup_takes_no_slot_and_so_many_sessions,
    ),
)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("found", MUTANTS, ids=lambda found: found.mutant.name)
def test_it_is_noticed(found: Caught, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.PATIENCE_SECONDS", 0.5)
    monkeypatch.setattr("tests.support.RUN_SECONDS", 3.0)
    with planted(found.mutant), pytest.raises((Exception, pytest.fail.Exception)):
        found.by()
