"""Distinguishes slow from hung verifiers, if another one could take over. A hung model may still report serving."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.rpc.errors import TandemError
from tandem.speculation.errors import SILENT, outcome_of
from tandem.speculation.retry import RetryBudget

Reply = TypeVar("Reply")

PROMPT_TOKEN_SECONDS = 0.005  # added per prompt token to the time of opening a session


class Waits:
    """Seconds before a request moves to another verifier: `silence` without any answer, `stall` while serving."""

    def __init__(self, silence: float, stall: float, retry_budget: RetryBudget) -> None:
        self._silence, self._stall, self._retry_budget = silence, stall, retry_budget

    def silence(self) -> float:
        return self._retry_budget.before_another(self._silence, 0.2)

    def round(self) -> float:
        return self._retry_budget.before_another(self._stall, 0.25)

    def opening(self, tokens: int) -> float:
        return self._retry_budget.before_another(self._stall + tokens * PROMPT_TOKEN_SECONDS, 0.25)


class Health(enum.Enum):
    """A health check's result; a server without a health service counts as serving."""

    SERVING = "it says that it is serving"
    NOT_SERVING = "it says that it is not serving"
    SILENT = "it answers no health check either"


async def check_health(channel: grpc.aio.Channel, service: str, seconds: float) -> Health:
    """Checks `service` (name without package) over an existing channel."""
    stub: Any = health_pb2_grpc.HealthStub(channel)
    request = health_pb2.HealthCheckRequest(service=f"tandem.v1.{service}")
    try:
        reply = await stub.Check(request, timeout=seconds)
    except grpc.RpcError as error:
        return Health.SILENT if outcome_of(error.code().name) in SILENT else Health.SERVING
    serving = reply.status == health_pb2.HealthCheckResponse.SERVING
    return Health.SERVING if serving else Health.NOT_SERVING


async def watch(
    what: str,
    check: Callable[[float], Awaitable[Health]],
    quiet: Callable[[], float],
    silence: Callable[[], float],
    stall: Callable[[], float] | None = None,
) -> TandemError:
    """Returns the error once the call `what`, unanswered for `quiet()` seconds, should be given up.

    After half of `silence()` the health is checked, for as long; a serving verifier may take `stall()`, or without
    it any time.
    """
    while True:
        pause = silence() / 2
        if quiet() < pause:
            await asyncio.sleep(pause - quiet())
            continue
        health = await check(pause)
        waited = quiet()
        if waited < pause:
            continue  # the verifier answered in the meantime
        said = f"{what} was not answered within {waited:.1f} s, and {health.value}"
        if health is Health.SILENT:
            return TandemError("DEADLINE_EXCEEDED", said)
        if health is Health.NOT_SERVING:
            return TandemError("UNAVAILABLE", said)
        left = stall() - waited if stall else pause
        if left <= 0:
            return TandemError("DEADLINE_EXCEEDED", said)
        await asyncio.sleep(min(pause, left))


async def answered(call: Awaitable[Reply], seconds: float, watching: Callable[[], Awaitable[TandemError]]) -> Reply:
    """Returns a call's reply; watches it after `seconds`. Raises the call's or the watch's error."""
    asking = asyncio.ensure_future(call)
    watcher: asyncio.Future[TandemError] | None = None
    try:
        await asyncio.wait((asking,), timeout=seconds)
        if not asking.done():
            watcher = asyncio.ensure_future(watching())
            await asyncio.wait((asking, watcher), return_when=asyncio.FIRST_COMPLETED)
        if asking.done() or watcher is None:
            return asking.result()
        raise watcher.result()
    finally:
        for task in (asking, watcher):
            if task is not None:
                task.cancel()
