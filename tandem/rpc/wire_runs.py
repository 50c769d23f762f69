"""Converts the messages of a run: a session whose verifier never waits."""

from __future__ import annotations

from tandem.rpc import wire
from tandem.speculation.draft_store import MAX_NODES, AheadDraft, Branch
from tandem.speculation.never_waiting import RunStep
from tandem.speculation.run_on import RunMessage
from tandem.speculation.types import InvalidField
from tandem.v1 import target_verifier_pb2 as pb


def run_message_to_wire(message: RunMessage, request: pb.VerifyRequest) -> pb.VerifyRequest:
    """Adds `message` to `request`, which names the session and its settings."""
    draft = message.draft
    request.base_length, request.last_token = draft.base_length, draft.last_token
    request.draft_tokens.extend(draft.token_ids)
    request.branches.extend(pb.DraftBranch(offset=b.offset, token_ids=b.token_ids) for b in draft.branches)
    request.run_until, request.max_step_drafts = message.run_until, message.most_drafts
    return request


def run_message_from_wire(request: pb.VerifyRequest) -> RunMessage:
    """Raises InvalidField naming the field. Token ids are not checked."""
    drafted = len(request.draft_tokens) + sum(len(branch.token_ids) for branch in request.branches)
    if drafted > MAX_NODES:
        raise InvalidField("draft_tokens", f"{drafted} tokens, branches included, are above {MAX_NODES}")
    for i, branch in enumerate(request.branches):
        if not branch.token_ids:
            raise InvalidField(f"branches[{i}].token_ids", "empty")
        if branch.offset > len(request.draft_tokens):
            raise InvalidField(f"branches[{i}].offset", f"{branch.offset} is beyond the draft")
    branches = tuple(Branch(branch.offset, tuple(branch.token_ids)) for branch in request.branches)
    draft = AheadDraft(request.base_length, request.last_token, tuple(request.draft_tokens), branches)
    return RunMessage(draft, request.run_until, request.max_step_drafts)


def run_step_from_wire(reply: pb.VerifyResponse, rtt: float | None) -> RunStep:
    """Converts a reply that is not stale."""
    verdict = wire.answer_from_wire(reply, 0.0).verdict
    assert verdict is not None
    return RunStep(verdict, reply.drafted, rtt)


def drafted_in(request: pb.VerifyRequest, reply: pb.VerifyResponse) -> int:
    """Returns how many draft tokens a step verified. `request`: what it answers, or the newest message of a run."""
    return int(reply.drafted) if request.HasField("run_until") else len(request.draft_tokens)
