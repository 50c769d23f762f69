"""Converts the messages of a run: a session whose verifier never waits."""

from __future__ import annotations

from tandem.speculation.draft_store import MAX_NODES, AheadDraft
from tandem.speculation.run_on import RunMessage
from tandem.speculation.types import InvalidField
from tandem.v1 import target_verifier_pb2 as pb


def run_message_to_wire(message: RunMessage, request: pb.VerifyRequest) -> pb.VerifyRequest:
    """Adds `message` to `request`, which names the session and its settings."""
    draft = message.draft
    request.base_length, request.last_token = draft.base_length, draft.last_token
    request.draft_tokens.extend(draft.token_ids)
    request.run_until, request.max_step_drafts = message.run_until, message.most_drafts
    return request


def run_message_from_wire(request: pb.VerifyRequest) -> RunMessage:
    """Raises InvalidField naming the field. Token ids are not checked."""
    if len(request.draft_tokens) > MAX_NODES:
        raise InvalidField("draft_tokens", f"{len(request.draft_tokens)} tokens are above {MAX_NODES}")
    draft = AheadDraft(request.base_length, request.last_token, tuple(request.draft_tokens))
    return RunMessage(draft, request.run_until, request.max_step_drafts)


def drafted_in(request: pb.VerifyRequest, reply: pb.VerifyResponse) -> int:
    """Returns how many draft tokens a step verified. `request`: what it answers, or the newest message of a run."""
    return int(reply.drafted) if request.HasField("run_until") else len(request.draft_tokens)
