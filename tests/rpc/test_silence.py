"""Slow or hanging: health checks scripted, and over the wire."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.rpc.channel import TARGET, open_channel
from tandem.rpc.errors import TandemError
from tandem.rpc.liveness import Health, Waits, answered, check_health, watch
from tandem.speculation.retry import Persistence, RetryBudget
from tests.support import listening, run


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def watched(checks: list[Health], quiet: list[float], stall: float | None = None) -> TandemError:
    """What a watch says: `quiet` are the seconds without an answer before and after each check; silence is 0.02."""

    async def check(seconds: float) -> Health:
        assert seconds == 0.01
        return checks.pop(0)

    async def test() -> TandemError:
        watching = watch("a round", check, lambda: quiet.pop(0), lambda: 0.02, (lambda: stall) if stall else None)
        return await asyncio.wait_for(watching, 10)

    return run(test())


def test_silence_is_a_failure_and_not_serving_another() -> None:
    error = watched([Health.SILENT], [1.0, 2.0])
    assert (error.code, error.message) == (
        "DEADLINE_EXCEEDED",
        "a round was not answered within 2.0 s, and it answers no health check either",
    )
    assert watched([Health.NOT_SERVING], [1.0, 2.0]).code == "UNAVAILABLE"


def test_one_that_is_serving_may_take_as_long_as_a_stall() -> None:
    left: list[Health] = [Health.SERVING] * 4
    error = watched(left, [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7], stall=1.35)
    assert error.code == "DEADLINE_EXCEEDED" and "it says that it is serving" in error.message
    assert len(left) == 1  # three checks


def test_without_a_stall_one_that_is_serving_is_waited_for_until_it_is_silent() -> None:
    checks = [Health.SERVING] * 20 + [Health.SILENT]
    assert watched(checks, [1e3] * 100).code == "DEADLINE_EXCEEDED"
    assert not checks


def test_an_answer_during_a_check_begins_anew() -> None:
    """It was silent to the check, and answered the call meanwhile."""
    checks = [Health.SILENT, Health.NOT_SERVING]
    assert watched(checks, [1.0, 0.0, 1.0, 1.0]).code == "UNAVAILABLE"


def test_a_call_is_watched_only_after_a_while_and_its_answer_comes_first() -> None:
    async def test() -> None:
        async def call(event: asyncio.Event) -> str:
            await event.wait()
            return "reply"

        async def hangs() -> TandemError:
            watches.append(1)
            return TandemError("DEADLINE_EXCEEDED", "silent")

        async def finds_nothing() -> Any:
            watches.append(2)
            now.set()
            await asyncio.Event().wait()

        watches: list[int] = []
        now = asyncio.Event()
        now.set()
        assert await answered(call(now), 3600, hangs) == "reply" and not watches
        with pytest.raises(TandemError, match="silent"):
            await answered(call(asyncio.Event()), 0.001, hangs)
        now.clear()
        assert await answered(call(now), 0.001, finds_nothing) == "reply" and watches == [1, 2]

    run(test())


class Scripted(health_pb2_grpc.HealthServicer):
    status: int | None = health_pb2.HealthCheckResponse.SERVING

    async def Check(self, request: Any, context: Any) -> Any:
        assert request.service == "tandem.v1.TargetVerifier"
        if self.status is None:
            await asyncio.Event().wait()
        return health_pb2.HealthCheckResponse(status=self.status)


def test_health_is_asked_over_the_wire() -> None:
    """A server that has no health service says so, and lives."""

    async def test() -> None:
        health = Scripted()
        register = partial(health_pb2_grpc.add_HealthServicer_to_server, health)
        async with listening(register) as address, open_channel(address) as channel:
            assert await check_health(channel, TARGET, 10.0) is Health.SERVING
            health.status = health_pb2.HealthCheckResponse.NOT_SERVING
            assert await check_health(channel, TARGET, 10.0) is Health.NOT_SERVING
            health.status = None
            assert await check_health(channel, TARGET, 0.05) is Health.SILENT
        async with listening(lambda server: None) as address, open_channel(address) as channel:
            assert await check_health(channel, TARGET, 10.0) is Health.SERVING
        async with open_channel("127.0.0.1:1") as channel:
            assert await check_health(channel, TARGET, 10.0) is Health.SILENT

    run(test())


def waits(clock: Clock, deadline: float | None = None) -> tuple[Waits, RetryBudget]:
    retry_budget = RetryBudget(Persistence(), deadline, clock, lambda: 1.0)
    return Waits(3.0, 4.0, retry_budget), retry_budget


def test_waits_are_a_share_of_the_deadline_and_double_with_each_failure() -> None:
    clock = Clock()
    of, retry_budget = waits(clock)
    assert (of.silence(), of.round(), of.opening(400)) == (3.0, 4.0, 6.0)
    retry_budget.wait()
    retry_budget.progress()
    assert (of.silence(), of.round(), of.opening(400)) == (6.0, 8.0, 12.0)  # where all are slow, one is waited for
    of, retry_budget = waits(clock, deadline=106.0)
    retry_budget.wait()
    assert (of.silence(), of.round()) == pytest.approx((1.2, 1.5))
    clock.now = 105.9
    assert of.silence() == 0.3  # a round trip is needed to hear of health
    assert max(waits(clock, clock.now + 9.0)[0].opening(1), waits(clock, clock.now + 9.0)[0].silence()) < 9.0 / 3
