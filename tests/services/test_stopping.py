"""How a target process ends: drained after SIGTERM (G11), lost with its device (G12) or killed, and who goes on."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from tandem.rpc.received_errors import TandemError
from tandem.speculation.verification_mode import Pipeline
from tests.daily import daily
from tests.support import (
    GREEDY,
    HANG,
    SAMPLED,
    ServerProcess,
    answer,
    distributed,
    ids,
    oracle,
    run,
    server_process,
    target_site,
    toy,
)
from tests.toy import ToyConfig

PROMPT = list(b"abcabcabcab")
LONG = ids(PROMPT, 90, sampling=SAMPLED, ignore_end_of_sequence=True)
TRUTH = oracle(PROMPT, SAMPLED, 90, past_the_end=True)
MODES = (Pipeline.OFF, Pipeline.ON, Pipeline.NEVER_WAITING)


@pytest.mark.parametrize("pipeline", daily(MODES, 2), ids=["unary", "stream", "run"])
def test_a_lost_device_ends_the_process_and_its_sessions_go_on_elsewhere(tmp_path: Path, pipeline: Pipeline) -> None:
    """G12, G1: ENGINE_LOST, NOT_SERVING, a non-zero end; clients re-open elsewhere and say the same tokens."""

    async def test(address: str) -> None:
        async with (
            target_site(toy(max_length=512)) as other,
            distributed(f"{address},{other.address}", "miss=0.3", pipeline=pipeline) as (generator, client),
        ):
            client.pool.current = address
            tokens = await asyncio.gather(*(answer(generator.generate, LONG) for _ in range(3)))
            assert {got.token_ids for got in tokens} == {TRUTH}
            assert client.address == other.address

    with server_process(tmp_path, "--role", "target", "--model", "fails=20") as server:
        run(test(server.wait_ready()))
        assert server.process.wait(HANG) == 1
        log = server.log.read_text()
        assert "the model's device is lost, and all sessions with it" in log and "Traceback" not in log


async def test_a_new_request_goes_to_the_verifier_that_is_not_stopping() -> None:
    """G11: a server that drains is as good as gone to whoever begins."""
    async with (
        target_site() as stopping,
        target_site() as other,
        distributed(f"{stopping.address},{other.address}", "miss=0.3") as (generator, client),
    ):
        client.pool.current = stopping.address
        stopping.lifecycle.accepting = False
        assert (await answer(generator.generate, ids(PROMPT, 9))).token_ids == oracle(PROMPT, GREEDY, 9)
        assert client.address == other.address
        other.lifecycle.accepting = False
        with pytest.raises(TandemError) as caught:
            client.retry_seconds = 0.2
            await answer(generator.generate, ids(PROMPT, 9))
        assert (caught.value.code, caught.value.reason) == ("UNAVAILABLE", "DRAINING")


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
