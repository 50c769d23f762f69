"""The choice between rounds that wait and a target that never waits."""

from __future__ import annotations

import pytest

from tandem.runners.toy import ToyConfig
from tandem.speculation.depth import Pipeline
from tandem.speculation.estimate import Estimate, Times
from tandem.speculation.verification_mode import never_waits
from tests.speculation.run_simulated import measurements
from tests.support import GREEDY, SAMPLED, answer, distributed, ids, oracle, run, target_site, toy


def test_waiting_is_chosen_near_the_target_and_never_waiting_far_from_it() -> None:
    def chosen(rtt: float, step: float) -> bool:
        return never_waits(Pipeline.AUTO, 5, measurements(Times(0.0003, step, rtt)))

    assert [chosen(rtt, 0.009) for rtt in (0.0, 0.002, 0.02, 0.2)] == [False, False, True, True]
    assert [chosen(rtt, 0.055) for rtt in (0.0, 0.01, 0.02, 0.1)] == [False, False, True, True]


def test_before_anything_is_measured_the_opening_decides_and_plain_decoding_never_waits() -> None:
    unknown = Estimate()
    assert [never_waits(Pipeline.AUTO, 5, unknown, rtt) for rtt in (0.0005, 0.02)] == [False, True]
    assert never_waits(Pipeline.AUTO, 0, unknown)
    assert never_waits(Pipeline.NEVER_WAITING, 5, unknown) and not never_waits(Pipeline.ON, 0, unknown, 1.0)


@pytest.mark.parametrize("runs", [False, True])
def test_a_request_says_what_the_target_says_whichever_way_is_chosen(
    runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.clients.distributed.never_waits", lambda *known: runs)

    async def test() -> None:
        async with target_site(toy(ToyConfig(step_seconds=0.002))) as site:
            async with distributed(site.address, "miss=0.2", pipeline=Pipeline.AUTO) as (generator, _):
                for sampling in (GREEDY, SAMPLED):
                    request = ids(b"abcabc", 90, sampling=sampling, ignore_end_of_sequence=True)
                    got = await answer(generator.generate, request)
                    assert got.token_ids == oracle(b"abcabc", sampling, 90, past_the_end=True)
                    assert (got.completion.stats.run_steps > 0) is runs
            assert site.free == 4

    run(test())
