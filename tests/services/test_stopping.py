"""How a target process ends: drained after SIGTERM (G11), or lost with its device (G12). Real processes."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.rpc.channel import open_channel
from tandem.rpc.errors import TandemError
from tandem.services.server import freeze_gc
from tandem.speculation.verification_mode import Pipeline
from tandem.v1 import target_verifier_pb2 as pb
from tests.daily import daily
from tests.services.test_errors import opening, refusal
from tests.support import (
    GREEDY,
    HANG,
    SAMPLED,
    answer,
    distributed,
    ids,
    oracle,
    raw_stub,
    run,
    server_process,
    target_site,
)
from tests.support import toy as toy_runner

PROMPT = list(b"abcabcabcab")
LONG = ids(PROMPT, 90, sampling=SAMPLED, ignore_end_of_sequence=True)
TRUTH = oracle(PROMPT, SAMPLED, 90, past_the_end=True)
MODES = (Pipeline.OFF, Pipeline.ON, Pipeline.NEVER_WAITING)


async def after(count: int, generate: Any, then: Callable[[], Any]) -> tuple[int, ...]:
    """All tokens of LONG; `then` is awaited once, after `count` of them."""
    seen: list[int] = []
    done = False
    async for event in generate(LONG):
        seen += getattr(event, "token_ids", ())
        if len(seen) >= count and not done:
            done = True
            await then()
    return tuple(seen)


async def health_changes(address: str, then: Callable[[], Any]) -> list[int]:
    """What a watch of the server's health said: before `then()`, and next."""
    async with open_channel(address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=""))
        said = [(await watch.read()).status]
        then()
        said.append((await watch.read()).status)
        watch.cancel()
        return said


CHANGES = [health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING]


def test_a_session_that_nobody_uses_holds_a_stopping_server_for_its_lease_at_most(tmp_path: Path) -> None:
    """G11, G5."""

    async def leave(address: str) -> None:
        async with raw_stub(address) as target:
            await target.OpenSession(opening())

    lease = ("--drain_seconds", "600", "--lease_seconds", "0.4")
    with server_process(tmp_path, "--role", "target", *lease) as server:
        run(leave(server.wait_ready()))
        assert server.stop() == 0


@pytest.mark.thorough  # daily in parts: test_process.py, and a lost device below
def test_drain_seconds_bound_the_stop_and_the_session_goes_on_elsewhere(tmp_path: Path) -> None:
    """G11, G1: what did not finish in time is finished by another verifier, token for token."""

    async def test(address: str, pid: int) -> None:
        async def stop() -> None:
            os.kill(pid, signal.SIGTERM)

        async with (
            target_site(toy_runner(max_length=512)) as other,
            distributed(f"{address},{other.address}", "miss=0.3") as (generator, client),
        ):
            client.pool.current = address
            assert await after(10, generator.generate, stop) == TRUTH
            assert client.address == other.address

    slow = ("--model", "step=0.03", "--drain_seconds", "0.2")
    with server_process(tmp_path, "--role", "target", *slow) as server:
        run(test(server.wait_ready(), server.process.pid))
        assert server.process.wait(HANG) == 0


@pytest.mark.parametrize("pipeline", daily(MODES, 2), ids=["unary", "stream", "run"])
def test_a_lost_device_ends_the_process_and_its_sessions_go_on_elsewhere(tmp_path: Path, pipeline: Pipeline) -> None:
    """G12, G1: ENGINE_LOST, NOT_SERVING, a non-zero end; clients re-open elsewhere and say the same tokens."""

    async def test(address: str) -> None:
        async with (
            target_site(toy_runner(max_length=512)) as other,
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


def test_a_lost_device_is_said_to_every_session_and_to_the_probe(tmp_path: Path) -> None:
    """G12: who computes on it, and who was idle."""

    async def test(address: str) -> None:
        async with raw_stub(address) as target:
            for name in ("idle", "busy"):
                await target.OpenSession(opening(session_id=name))
            prefix = [1, 2, 3]
            truth = oracle(prefix, GREEDY, 40)
            round_ = pb.VerifyRequest(session_id="idle", base_length=3, last_token=3)

            async def compute() -> list[str]:
                for at in range(40):
                    known = [*prefix, *truth[:at]]
                    asked = pb.VerifyRequest(session_id="busy", base_length=len(known), last_token=known[-1])
                    try:
                        await target.Verify(asked)
                    except Exception:
                        break
                return [(await refusal(target.Verify(each))).reason for each in (asked, round_)]

            computing: list[asyncio.Task[list[str]]] = []
            said = await health_changes(address, lambda: computing.append(asyncio.create_task(compute())))
            assert said == CHANGES
            reasons = await computing[0]
            assert set(reasons) <= {"ENGINE_LOST", ""}  # "": the connection ended before it could be said

    with server_process(tmp_path, "--role", "target", "--model", "fails=9") as server:
        run(test(server.wait_ready()))
        assert server.process.wait(HANG) == 1


def test_a_new_request_goes_to_the_verifier_that_is_not_stopping() -> None:
    """G11: a server that drains is as good as gone to whoever begins."""

    async def test() -> None:
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
                client.persistence = type(client.persistence)(0.2)
                await answer(generator.generate, ids(PROMPT, 9))
            assert (caught.value.code, caught.value.reason) == ("UNAVAILABLE", "DRAINING")

    run(test())


def test_what_loading_left_is_not_looked_through_while_requests_are_served() -> None:
    freeze_gc()
    try:
        assert gc.get_freeze_count() > 10_000
    finally:
        gc.unfreeze()
