"""The messages of a run on the wire."""

from __future__ import annotations

import pytest

from tandem.rpc.wire_sessions import (
    STEPS_TOGETHER,
    VerdictBounds,
    answer_from_wire,
    run_message_from_wire,
    run_message_to_wire,
    steps_from_wire,
)
from tandem.speculation.run_on import RunMessage
from tandem.speculation.types import InvalidField, Request
from tandem.v1 import target_verifier_pb2 as pb


def test_a_runs_message_says_how_long_a_copy_may_be_and_the_target_bounds_it() -> None:
    message = RunMessage(3, 7, (1, 2), 20, 4, 5)
    wire = run_message_to_wire(message, pb.VerifyRequest())
    assert run_message_from_wire(wire, 5) == message
    assert run_message_from_wire(wire, 2) == RunMessage(3, 7, (1, 2), 20, 2, 2)
    wire.ClearField("max_step_copies")  # of a client that knows of no copies
    assert run_message_from_wire(wire, 5).most_copies == 0


def a_step(length: int, *after: pb.VerifyResponse) -> pb.VerifyResponse:
    return pb.VerifyResponse(token_ids=[7], committed_length=length, messages_read=1, next_steps=after)


def test_a_reply_holds_its_own_step_and_those_after_it_in_order() -> None:
    most = a_step(1, *(a_step(2 + i) for i in range(STEPS_TOGETHER - 1)))
    assert [step.committed_length for step in steps_from_wire(most)] == list(range(1, STEPS_TOGETHER + 1))
    assert steps_from_wire(a_step(5)) == [a_step(5)]


def test_the_reply_to_a_round_holds_no_further_steps() -> None:
    with pytest.raises(InvalidField, match="next_steps: 1 is outside 0 to 0"):
        answer_from_wire(a_step(4, a_step(5)), pb.VerifyRequest(base_length=3), VerdictBounds(256, 5, Request()), 1.0)


@pytest.mark.parametrize(
    "reply, says",
    [
        (a_step(1, *(a_step(2 + i) for i in range(STEPS_TOGETHER))), "next_steps: 32 are above 31"),
        (a_step(1, a_step(2, a_step(3))), "next_steps: one of them has next_steps of its own"),
    ],
    ids=["too many", "nested"],
)
def test_a_reply_that_holds_more_than_it_may_breaks_the_contract(reply: pb.VerifyResponse, says: str) -> None:
    with pytest.raises(InvalidField, match=says):
        steps_from_wire(reply)
