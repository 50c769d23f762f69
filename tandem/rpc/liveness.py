"""Distinguishes a slow verifier from a hung one during a call, when another verifier could be called instead.

A stopped or disconnected process answers no health check. One whose model hangs may keep reporting that it is serving
until it notices.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.rpc.errors import TandemError
from tandem.speculation.outcomes import SILENT, outcome_of

Reply = TypeVar("Reply")


class Health(enum.Enum):
    """Result of a health check. A server that answers that it has no health service counts as serving."""

    SERVING = "it says that it is serving"
    NOT_SERVING = "it says that it is not serving"
    SILENT = "it answers no health check either"


async def check_health(channel: grpc.aio.Channel, service: str, seconds: float) -> Health:
    """Checks `service` (name without package) at the standard health service, over an existing channel."""
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
    """Waits until a verifier should be given up, and returns the reason as an error.

    `what` names the call, which has been unanswered for `quiet()` seconds. After half of `silence()` the verifier's
    health is checked, with the same time to answer. A serving verifier may take `stall()` seconds; without `stall`, it
    may take any time.
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
    """Returns a call's reply; watches it after `seconds`. Raises the call's error, or the watch's if it ends first."""
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
