"""The table of cases: what each proves, where it runs, and why not elsewhere."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tests.conformance import generations, proposals, sessions
from tests.conformance.bench import ARCHITECTURES, Bench, Combination
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
    transports: tuple[str, ...] = ("unary", "stream")
    lease_seconds: float = LEASE

    @property
    def name(self) -> str:
        return self.case.__name__

    @property
    def says(self) -> str:
        return (self.case.__doc__ or "").split("\n")[0].strip()

    def left_out(self, combination: Combination) -> str:
        """Why it does not run there; empty where it does."""
        if combination.architecture == "fused" and combination.transport == "unary":
            return "a fused server has one method, a stream: there is no unary round"
        if combination.architecture not in self.architectures:
            return _NOT_THERE[combination.architecture if self.architectures == ("draft_worker",) else self.kind]
        if combination.transport not in self.transports:
            return "proposals are unary calls: the transport of rounds makes no difference"
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
_ALL, _SESSIONS, _LINKS, _WORKER = ARCHITECTURES, ("distributed",), ("distributed", "draft_worker"), ("draft_worker",)

CASES = (
    Entry(generations.greedy_output_equals_plain, ("G1",), _ALL, real=True),
    Entry(generations.sampled_output_depends_on_seed_only, ("G1",), _ALL, real=True),
    Entry(generations.k_zero_equals_plain, ("G1", "G10"), _ALL, real=True),
    Entry(generations.neighbours_change_nothing, ("G1", "G7"), _ALL),
    Entry(generations.ends_at_a_stop_token, ("G1",), _ALL),
    Entry(generations.cancel_frees_slot, ("G7",), _ALL),
    Entry(generations.bad_fields_are_named, ("G9",), _ALL),
    Entry(generations.too_long_is_out_of_range, ("G9",), _ALL),
    Entry(generations.model_info_states_limits, ("G8",), _ALL),
    Entry(generations.drain_refuses_new_and_finishes_running, ("G11",), _ALL, inside=True),
    Entry(generations.resume_after_expiry, ("G1", "G5"), _LINKS, inside=True, real=True),
    Entry(generations.lost_replies_cost_no_token, ("G1", "G2", "G3"), _LINKS, inside=True, real=True),
    Entry(sessions.open_says_length_and_lease, ("G4", "G5"), _SESSIONS),
    Entry(sessions.rounds_commit_the_targets_own, ("G1", "G3"), _SESSIONS, real=True),
    Entry(sessions.lost_reply_is_replayed, ("G2", "G3"), _SESSIONS, real=True),
    Entry(sessions.stale_round_applies_nothing, ("G2",), _SESSIONS),
    Entry(sessions.two_rounds_at_once_commit_once, ("G2", "G6"), _SESSIONS),
    Entry(sessions.k_zero_round, ("G10",), _SESSIONS, real=True),
    Entry(sessions.reopen_resumes_and_rebuilds, ("G4",), _SESSIONS, real=True),
    Entry(sessions.reopen_with_other_prefix_is_refused, ("G4",), _SESSIONS),
    Entry(sessions.expired_session_is_not_found, ("G5",), _SESSIONS, inside=True, lease_seconds=1.0),
    Entry(sessions.unknown_session_is_not_found, ("G5",), _SESSIONS),
    Entry(sessions.full_server_refuses_with_retry_info, ("G6",), _SESSIONS),
    Entry(sessions.broken_connection_keeps_the_session, ("G5", "G7"), _SESSIONS),
    Entry(sessions.cancelled_open_frees_slot, ("G7",), _SESSIONS, inside=True),
    Entry(sessions.close_frees_slot_once, ("G7",), _SESSIONS),
    Entry(sessions.tokenizer_mismatch, ("G8",), _SESSIONS),
    Entry(sessions.bad_open_fields, ("G9",), _SESSIONS),
    Entry(sessions.bad_round_fields, ("G9",), _SESSIONS),
    Entry(proposals.same_tokens_same_proposal, ("G2",), _WORKER, transports=("unary",)),
    Entry(proposals.unknown_tokens_are_asked_for, ("G5",), _WORKER, transports=("unary",)),
    Entry(proposals.bad_proposal_fields, ("G8", "G9"), _WORKER, transports=("unary",)),
)


def table() -> str:
    """The cases as the table of docs/conformance.md."""
    lines = [
        "| case | proves | says | distributed | fused | draft_worker | real pair |",
        "|---|---|---|---|---|---|---|",
    ]
    for entry in CASES:
        runs = ["yes" if entry.left_out(Combination(a, "stream", "toy")) == "" else "-" for a in ARCHITECTURES]
        if entry.architectures == _WORKER:
            runs[2] = "unary"
        where = " | ".join(runs)
        proves = ", ".join(entry.guarantees)
        lines.append(f"| `{entry.name}` | {proves} | {entry.says} | {where} | {'yes' if entry.real else '-'} |")
    return "\n".join(lines)
