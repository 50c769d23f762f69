"""A draft client whose verifier is gone and that finds no other ends in time, with an error that has the tokens so far.

That it goes on where there is one: tests/reliability/test_kills.py.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tandem.rpc.received_errors import TandemError
from tandem.speculation.verification_mode import Pipeline
from tests.daily import daily
from tests.support import SAMPLED, ServerProcess, distributed, ids, oracle, run, server_process, target_site, toy
from tests.toy import ToyConfig

PROMPT = list(b"abcabcabcab")
MODES, NAMES = (Pipeline.OFF, Pipeline.ON, Pipeline.NEVER_WAITING), ("unary", "stream", "run")
LONG = ids(PROMPT, 90, sampling=SAMPLED, ignore_end_of_sequence=True)
TRUTH = oracle(PROMPT, SAMPLED, 90, past_the_end=True)


@pytest.mark.parametrize("pipeline", daily(MODES, 0), ids=["unary", "stream", "run"])
def test_a_verifier_that_runs_another_model_does_not_take_over_and_the_reason_is_said(
    tmp_path: Path, pipeline: Pipeline, caplog: pytest.LogCaptureFixture
) -> None:
    """G8, and G1 above all: no token of another model."""

    async def test(first: ServerProcess) -> None:
        async with target_site(toy(ToyConfig(salt=1), max_length=512)) as other:
            address = first.wait_ready()
            async with distributed(
                f"{address},{other.address}", "miss=0.3", pipeline=pipeline, reconnect_seconds=1.0
            ) as (generator, client):
                client.pool.current = address
                info = await client.endpoints[address].info(5.0)
                client.expected, client.endpoints[other.address].suspect = info, True
                seen: list[int] = []
                with pytest.raises(TandemError, match="given up after") as caught:
                    async for event in generator.generate(LONG):
                        seen += getattr(event, "token_ids", ())
                        if first.process.poll() is None and len(seen) >= 20:
                            os.kill(first.process.pid, signal.SIGKILL)
                            first.process.wait()
                assert tuple(seen) == TRUTH[: len(seen)] and len(seen) >= 20
                assert caught.value.code == "UNAVAILABLE"
                assert caught.value.produced == tuple(seen)
            assert len(other.verifier.sessions) == 0 and other.engine.batcher.steps == 0

    with server_process(tmp_path, "--role", "target", "--model", "step=0.004") as first:
        run(test(first))
    assert "is not used: the TargetVerifier at" in caplog.text
    assert "weights_revision is 'toy:1', but this client started with 'toy:0'" in caplog.text
