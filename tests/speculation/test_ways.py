"""The choice between rounds that wait and a target that never waits."""

from __future__ import annotations

from tandem.speculation.estimate import Estimate
from tandem.speculation.verification_mode import Depth, Pipeline, never_waits
from tests.speculation.run_simulated import measurements


def test_waiting_is_chosen_near_the_target_and_never_waiting_far_from_it() -> None:
    def chosen(rtt: float, step: float) -> bool:
        return never_waits(Pipeline.AUTO, 5, measurements(0.0003, step, rtt))

    assert [chosen(rtt, 0.009) for rtt in (0.0, 0.002, 0.02, 0.2)] == [False, False, True, True]
    assert [chosen(rtt, 0.055) for rtt in (0.0, 0.01, 0.02, 0.1)] == [False, False, True, True]


def test_before_anything_is_measured_the_opening_decides_and_plain_decoding_never_waits() -> None:
    unknown = Estimate()
    assert [never_waits(Pipeline.AUTO, 5, unknown, rtt) for rtt in (0.0005, 0.02)] == [False, True]
    assert never_waits(Pipeline.AUTO, 0, unknown)
    assert never_waits(Pipeline.NEVER_WAITING, 5, unknown) and not never_waits(Pipeline.ON, 0, unknown, 1.0)


def test_as_many_rounds_are_in_flight_as_are_drafted_during_a_round_trip() -> None:
    def depth(pipeline: Pipeline, rtt: float) -> int:
        return Depth(pipeline, 8, measurements(0.002, 0.009, rtt)).of(3)

    assert [depth(Pipeline.AUTO, rtt) for rtt in (0.0, 0.001, 0.02, 1.0)] == [1, 1, 4, 8]
    assert [depth(pipeline, 0.0) for pipeline in (Pipeline.OFF, Pipeline.ON)] == [1, 2]
