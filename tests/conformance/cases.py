"""The table of cases: what each proves, where it runs, and why not elsewhere."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from tests.conformance import features, generations, proposals, runs, sessions
from tests.conformance.bench import ARCHITECTURES, TRANSPORTS, Bench, Combination
from tests.support import LEASE

Case = Callable[[Bench], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Entry:
    """A case. `inside`: it reaches into a server of this process. `real`: it also runs on the real pair."""

    case: Case
    guarantees: tuple[str, ...]
    architectures: tuple[str, ...]
    inside: bool = False
    real: bool = False
    transports: tuple[str, ...] = TRANSPORTS
    lease_seconds: float = LEASE

    @property
    def name(self) -> str:
        return self.case.__name__

    @property
    def says(self) -> str:
        return (self.case.__doc__ or "").split("\n")[0].strip()

    def left_out(self, combination: Combination) -> str:
        """Why it does not run there; empty where it does."""
        if combination.architecture == "fused" and combination.transport != "stream":
            return "a fused server has one method, a stream: there is no other round"
        if combination.architecture not in self.architectures:
            return _NOT_THERE[combination.architecture if self.architectures == ("draft_worker",) else self.kind]
        if combination.transport not in self.transports:
            return _NOT_OVER[self.transports]
        if combination.runner == "torch" and not self.real:
            return "the protocol's: no model makes a difference to it, so the toy runner is enough"
        return ""

    @property
    def kind(self) -> str:
        return "sessions" if self.architectures == ("distributed",) else "links"


_NOT_THERE = {
    "sessions": "sessions are between a TargetVerifier and who drafts: run with the distributed architecture",
    "links": "there is no link between draft and target",
    "distributed": "proposals are a DraftWorker's",
    "fused": "proposals are a DraftWorker's",
}
_ROUNDS, _RUN, _UNARY = ("unary", "stream"), ("run",), ("unary",)
_NOT_OVER = {
    _ROUNDS: "a round is a call or a message of a stream: what a run does has cases of its own",
    _RUN: "what a run does needs a run",
    _UNARY: "proposals have a stream of their own: the transport of rounds makes no difference",
}
_ALL, _SESSIONS, _LINKS, _WORKER = ARCHITECTURES, ("distributed",), ("distributed", "draft_worker"), ("draft_worker",)


def _session(case: Case, *guarantees: str, **rest: Any) -> Entry:
    """A case of rounds, spoken directly."""
    return Entry(case, guarantees, _SESSIONS, transports=_ROUNDS, **rest)


def _run(case: Case, *guarantees: str, **rest: Any) -> Entry:
    """A case of runs, spoken directly."""
    return Entry(case, guarantees, _SESSIONS, transports=_RUN, **rest)


CASES = (
    Entry(generations.greedy_output_equals_plain, ("G1",), _ALL, real=True),
    Entry(generations.sampled_output_depends_on_seed_only, ("G1",), _ALL, real=True),
    Entry(generations.k_zero_equals_plain, ("G1", "G10"), _ALL, real=True),
    Entry(generations.chosen_drafts_equal_plain, ("G1", "G9"), _ALL, real=True),
    Entry(generations.predictions_change_no_token, ("G1",), _ALL, real=True),
    Entry(generations.messages_equal_a_chat, ("G1", "G9"), _ALL, real=True),
    Entry(generations.receipts_are_of_the_answer, ("G1", "G9"), _ALL),
    Entry(generations.neighbours_change_nothing, ("G1", "G7"), _ALL),
    Entry(generations.adapters_are_kept_apart, ("G1",), _ALL),
    Entry(generations.unknown_adapter_is_named, ("G9",), _ALL),
    Entry(generations.prefill_elsewhere_equals_plain, ("G1", "G7"), _ALL, inside=True),
    Entry(generations.ends_at_a_stop_token, ("G1",), _ALL),
    Entry(generations.cancel_frees_slot, ("G7",), _ALL),
    Entry(generations.bad_fields_are_named, ("G9",), _ALL),
    Entry(generations.too_long_is_out_of_range, ("G9",), _ALL),
    Entry(generations.model_info_states_limits, ("G8",), _ALL),
    Entry(generations.drain_refuses_new_and_finishes_running, ("G11",), _ALL, inside=True),
    Entry(generations.resume_after_expiry, ("G1", "G5"), _LINKS, inside=True, real=True),
    Entry(generations.lost_replies_cost_no_token, ("G1", "G2", "G3"), _LINKS, inside=True, real=True),
    _session(sessions.open_says_length_and_lease, "G4", "G5"),
    _session(sessions.rounds_commit_the_targets_own, "G1", "G3", real=True),
    _session(sessions.lost_reply_is_replayed, "G2", "G3", real=True),
    _session(sessions.stale_round_applies_nothing, "G2"),
    _session(sessions.two_rounds_at_once_commit_once, "G2", "G6"),
    _session(sessions.k_zero_round, "G10", real=True),
    _session(sessions.reopen_resumes_and_rebuilds, "G4", real=True),
    _session(sessions.reopen_with_other_prefix_is_refused, "G4"),
    _session(sessions.adapter_lasts_as_long_as_the_session, "G1", "G4"),
    _session(sessions.expired_session_is_not_found, "G5", inside=True, lease_seconds=1.0),
    _session(sessions.unknown_session_is_not_found, "G5"),
    _session(sessions.full_server_refuses_with_retry_info, "G6"),
    _session(sessions.broken_connection_keeps_the_session, "G5", "G7"),
    _session(sessions.cancelled_open_frees_slot, "G7", inside=True),
    _session(sessions.close_frees_slot_once, "G7"),
    _session(sessions.tokenizer_mismatch, "G8"),
    _session(sessions.bad_open_fields, "G9"),
    _session(sessions.bad_round_fields, "G9"),
    _session(features.features_are_the_same_again, "G2", "G3", "G4"),
    _session(features.features_are_negotiated, "G4", "G9"),
    _run(runs.run_is_negotiated, "G4", "G9"),
    _run(runs.run_begins_before_its_opening, "G4", "G9"),
    _run(runs.run_begins_with_the_prompts_last_step, "G1", "G4", real=True),
    _run(runs.run_steps_on_alone, "G1", "G3", "G10", real=True),
    _run(runs.run_pauses_at_its_limit, "G2"),
    _run(runs.run_obeys_its_window, "G6"),
    _run(runs.run_takes_late_drafts, "G1", "G3", real=True),
    _run(runs.run_drops_drafts_on_other_tokens, "G1", "G2"),
    _run(runs.run_ends_at_a_stop_token, "G1"),
    _run(runs.run_first_message_is_fenced, "G2"),
    _run(runs.run_resumes_after_a_lost_stream, "G1", "G4", "G5", real=True),
    _run(runs.run_ends_when_others_commit, "G2", "G6"),
    _run(runs.run_leaves_rounds_as_they_are, "G2"),
    _run(runs.paused_run_loses_its_lease, "G5", inside=True, lease_seconds=1.0),
    _run(runs.bad_run_fields, "G9"),
    Entry(runs.older_target_is_asked_in_rounds, ("G1",), _LINKS, inside=True, transports=_RUN),
    Entry(proposals.same_tokens_same_proposal, ("G2",), _WORKER, transports=_UNARY),
    Entry(proposals.bad_proposal_fields, ("G8", "G9"), _WORKER, transports=_UNARY),
)


def table() -> str:
    """The cases as a Markdown table."""
    lines = [
        "| case | proves | says | distributed | fused | draft_worker | real pair |",
        "|---|---|---|---|---|---|---|",
    ]
    for entry in CASES:
        only = entry.transports[0] if len(entry.transports) == 1 else ""
        where = " | ".join((only or "yes") if a in entry.architectures else "-" for a in ARCHITECTURES)
        proves = ", ".join(entry.guarantees)
        lines.append(f"| `{entry.name}` | {proves} | {entry.says} | {where} | {'yes' if entry.real else '-'} |")
    return "\n".join(lines)
