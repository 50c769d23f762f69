"""Converts the messages of a run: a session whose verifier never waits."""

from __future__ import annotations

from tandem.speculation.run_on import RunMessage
from tandem.speculation.types import MAX_DRAFTED, InvalidField
from tandem.v1 import target_verifier_pb2 as pb

STEPS_TOGETHER = 32
"""The most steps of a run in one reply."""


def run_message_to_wire(message: RunMessage, request: pb.VerifyRequest) -> pb.VerifyRequest:
    """Adds `message` to `request`, which names the session and its settings."""
    request.base_length, request.last_token = message.base_length, message.last_token
    request.draft_tokens.extend(message.token_ids)
    request.run_until, request.max_step_drafts = message.run_until, message.most_drafts
    request.max_step_copies = message.most_copies
    return request


def run_message_from_wire(request: pb.VerifyRequest, most: int) -> RunMessage:
    """Raises InvalidField naming the field. Token ids are not checked. `most`: draft tokens that a step can verify."""
    if len(request.draft_tokens) > MAX_DRAFTED:
        raise InvalidField("draft_tokens", f"{len(request.draft_tokens)} tokens are above {MAX_DRAFTED}")
    draft, width = tuple(request.draft_tokens), min(request.max_step_drafts, most)
    copies = min(request.max_step_copies, most)
    return RunMessage(request.base_length, request.last_token, draft, request.run_until, width, copies)


def steps_from_wire(reply: pb.VerifyResponse) -> list[pb.VerifyResponse]:
    """Returns the steps that a reply to a run holds, oldest first. Raises InvalidField. Nothing else is checked."""
    if len(reply.next_steps) >= STEPS_TOGETHER:
        raise InvalidField("next_steps", f"{len(reply.next_steps)} are above {STEPS_TOGETHER - 1}")
    if any(step.next_steps for step in reply.next_steps):
        raise InvalidField("next_steps", "one of them has next_steps of its own")
    return [reply, *reply.next_steps]


def drafted_in(request: pb.VerifyRequest, reply: pb.VerifyResponse) -> int:
    """Returns how many draft tokens a step verified. `request`: what it answers, or the newest message of a run."""
    return int(reply.drafted) if request.HasField("run_until") else len(request.draft_tokens)
