"""The messages of a run on the wire."""

from __future__ import annotations

from tandem.rpc.wire_runs import run_message_from_wire, run_message_to_wire
from tandem.speculation.run_on import RunMessage
from tandem.v1 import target_verifier_pb2 as pb


def test_a_runs_message_says_how_long_a_copy_may_be_and_the_target_bounds_it() -> None:
    message = RunMessage(3, 7, (1, 2), 20, 4, 5)
    wire = run_message_to_wire(message, pb.VerifyRequest())
    assert run_message_from_wire(wire, 5) == message
    assert run_message_from_wire(wire, 2) == RunMessage(3, 7, (1, 2), 20, 2, 2)
    wire.ClearField("max_step_copies")  # of a client that knows of no copies
    assert run_message_from_wire(wire, 5).most_copies == 0
