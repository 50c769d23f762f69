"""What keeps runs exact, bounded and short-lived, taken away piece by piece: a test must notice each time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.reliability import test_runs as reliability
from tests.reliability.mutants import planted
from tests.rpc import test_propose_stream
from tests.services import test_calls, test_runs
from tests.services.test_session_mutants import Caught, caught
from tests.speculation import test_adopting, test_never_waiting, test_self_paced_run
from tests.support import GREEDY, SAMPLED

RUN = "tandem.speculation.run_on:SelfPacedRun"
AHEAD = "tandem.speculation.ahead:DraftingAhead"
FOLLOWER = "tandem.speculation.draft_follower:Follower"


class NoLog:
    """Stands for caplog: what is logged is not what notices."""

    messages = ("a line with DEADLINE_EXCEEDED, decoding without drafts",)

    def at_level(self, *_: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def no_log(test: Callable[..., None], *arguments: Any) -> Callable[[], None]:
    return lambda: test(*arguments, NoLog())


TOO_MANY = (test_runs.running(test_runs.PROMPT, [1] * 257), "INVALID_ARGUMENT", "257 tokens")

MUTANTS = (
    caught(
        "a client that takes one step at a time gets several",
        "tandem.services.verify_runs:VerifyRuns._begun",
        "if request.takes_several and",
        "if",
        test_runs.test_steps_that_are_known_together_come_in_one_reply_to_a_client_that_takes_several,
    ),
    caught(
        "the newest step of a reply comes first",
        "tandem.services.verify_runs:Run._next_reply",
        "self._waiting.popleft() if",
        "self._waiting.pop() if",
        test_runs.test_steps_that_are_known_together_come_in_one_reply_to_a_client_that_takes_several,
    ),
    caught(
        "a run does not care what was read",
        f"{RUN}.next_draft",
        "min(self._until, self._acknowledged + self._max_unread)",
        "self._until",
        test_self_paced_run.test_a_client_that_acknowledges_nothing_stops_the_run_and_an_acknowledgement_lets_it_go_on,
    ),
    caught(
        "a step may pass the limit by one",
        f"{RUN}.next_draft",
        "self._draft[: min(self._most, room - 1)]",
        "self._draft[: min(self._most, room)]",
        test_self_paced_run.test_a_run_steps_plainly_without_a_draft_and_verifies_no_more_than_it_may,
    ),
    caught(
        "a stop token does not stop",
        f"{RUN}.note_stops",
        "not self._stops.isdisjoint(token_ids)",
        "False",
        test_runs.test_a_stop_token_ends_the_run_at_once,
    ),
    caught(
        "a caller who reads slowly lets the target run away",
        f"{AHEAD}._allowed",
        "min(self.end, self.used + self.window)",
        "self.end",
        test_never_waiting.test_a_caller_who_reads_slowly_stops_the_target_and_gets_every_token,
    ),
    caught(
        "drafting goes on from what the target contradicted",
        f"{AHEAD}.arrived",
        "if not follows:",
        "if at >= len(self._path):",
        test_never_waiting.test_the_time_per_token_is_the_theorys_within_an_eighth,
    ),
    caught(
        "a run survives the close of its session",
        "tandem.services.verify_runs:_session_ended",
        "session.resources.end_run(",
        "isinstance(session, ",
        partial(test_runs.test_leaving_frees_the_slot_within_a_step_and_leaves_no_task, "close"),
    ),
    caught(
        "a run survives an opening",
        "tandem.services.target_verifier:TargetVerifierService.OpenSession",
        "session.resources.end_run()",
        "pass",
        test_runs.test_what_else_happens_to_the_session_ends_its_run,
    ),
    caught(
        "a run goes on although another call took its session",
        "tandem.services.verify_runs:VerifyRuns._step",
        "if resources.run is not run:",
        "if False:",
        test_runs.test_a_step_that_waits_for_its_session_while_another_call_takes_it_is_not_made,
    ),
    caught(
        "a run may go further than its session",
        "tandem.services.verify_runs:VerifyRuns._message",
        "if request.run_until > session.max_total_tokens:",
        "if request.run_until > self._info.max_sequence_length:",
        test_runs.test_a_run_goes_no_further_than_its_session_was_opened_for,
    ),
    caught(
        "a run survives the end of its messages",
        "tandem.services.duplex:Duplex._ending",
        "self.end()",
        "pass",
        partial(test_runs.test_leaving_frees_the_slot_within_a_step_and_leaves_no_task, "done_writing"),
    ),
    caught(
        "the first message is not fenced",
        "tandem.services.verify_runs:VerifyRuns._begun",
        "if fence is Fence.STALE:",
        "if False:",
        test_runs.test_the_first_message_is_fenced_like_a_round,
    ),
    caught(
        "a run verifies by rejection",
        "tandem.services.verify_runs:VerifyRuns._check_first",
        "if rule is not Rule.AGREEMENT:",
        "if False:",
        test_runs.test_the_rejection_rule_does_not_run_and_says_so,
    ),
    caught(
        "a worker drafts on from what was contradicted",
        f"{FOLLOWER}.arrived",
        "self._ahead.arrived(token_ids)",
        "self._ahead.known.extend(token_ids); self._ahead._news.set()",
        partial(test_propose_stream.test_the_worker_follows_every_arrival_and_drafts_anew_where_it_was_wrong, SAMPLED),
    ),
    caught(
        "a worker drafts as far as it was first told",
        f"{FOLLOWER}.arrived",
        "self._reach.plan = plan",
        "pass",
        partial(test_propose_stream.test_the_worker_follows_every_arrival_and_drafts_anew_where_it_was_wrong, GREEDY),
    ),
    caught(
        "a session of proposals outlives its stream",
        "tandem.services.sessions.proposals:Proposals._followed",
        "self.sessions.drop(key)",
        "pass",
        partial(test_propose_stream.test_the_session_ends_with_the_stream_and_the_stream_with_the_session, "cancel"),
    ),
    caught(
        "a stream outlives its session",
        "tandem.services.sessions.proposals:Proposals._followed",
        "self.sessions.touch(key, session)",
        "pass",
        partial(
            test_propose_stream.test_the_session_ends_with_the_stream_and_the_stream_with_the_session, "EndProposals"
        ),
    ),
    caught(
        "any length is believed that a worker says it drafts after",
        "tandem.rpc.propose_stream:ProposeStream.check",
        'check.count("base_length", reply.base_length, self.told, 1)',
        "pass",
        no_log(test_propose_stream.test_a_worker_that_drafts_after_tokens_it_was_never_told_has_failed, 0),
    ),
    caught(
        "a silent worker is never given up",
        "tandem.rpc.duplex:Duplex._look",
        "if left > 0:",
        "if True:",
        no_log(test_propose_stream.test_a_worker_that_never_answers_delays_no_token_and_is_given_up),
    ),
    caught(
        "a late draft counts twice",
        f"{AHEAD}.adopt",
        "if at >= self._observed:",
        "if True:",
        test_adopting.test_a_late_draft_is_compared_once_and_what_it_reaches_beyond_is_used,
    ),
    caught(
        "a contradicted draft is adopted",
        f"{AHEAD}.adopt",
        "if not hit:",
        "if False:",
        test_adopting.test_a_draft_that_the_target_contradicted_meanwhile_is_dropped,
    ),
    caught(
        "a stop that is replayed does not end the run",
        "tandem.services.verify_runs:VerifyRuns._begun",
        "paced.note_stops(replay.token_ids if replay else ())",
        "pass",
        reliability.test_a_stop_whose_reply_was_lost_ends_the_next_run_too,
    ),
    caught(
        "steps that were read ahead are no waste",
        "tandem.speculation.never_waiting:NeverWaitingRounds._leave",
        "isinstance(self._steps.get_nowait(), RunStep)",
        "0 * bool(self._steps.get_nowait())",
        reliability.test_steps_that_were_read_ahead_and_never_used_are_waste,
    ),
    caught(
        "a run's session is anybody's",
        "tandem.services.verify_runs:VerifyRuns.replies",
        "session_key(caller(), request.session_id)",
        'session_key("me", request.session_id)',
        reliability.test_a_run_belongs_to_who_opened_its_session,
    ),
    caught(
        "a run goes on after another has begun",
        "tandem.services.verify_runs:VerifyRuns._begun",
        "session.resources.end_run()",
        "pass",
        reliability.test_the_first_message_of_a_run_that_comes_again_late_disturbs_nothing,
    ),
    caught(
        "a step verifies more drafts than the runner can",
        "tandem.rpc.wire_runs:run_message_from_wire",
        "min(request.max_step_drafts, most)",
        "request.max_step_drafts",
        test_runs.test_a_step_verifies_no_more_drafts_than_the_runner_can,
    ),
    caught(
        "a message does not renew the lease",
        "tandem.services.verify_runs:VerifyRuns._message",
        "self._sessions.touch(session.session_id, session)",
        "pass",
        test_runs.test_every_message_renews_the_lease,
    ),
    caught(
        "a message of a run that pauses at 0 is remembered for ever",
        "tandem.services.observability.calls:CallLayer.received",
        "if begins_run(message):",
        'if getattr(message, "run_until", 0):',
        test_calls.test_of_a_runs_messages_only_the_newest_is_kept,
    ),
    caught(
        "the drafts of a run have no limit",
        "tandem.rpc.wire_runs:run_message_from_wire",
        "if len(request.draft_tokens) > MAX_NODES:",
        "if False:",
        partial(test_runs.test_an_invalid_message_ends_the_run_and_harms_no_session, *TOO_MANY),
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
