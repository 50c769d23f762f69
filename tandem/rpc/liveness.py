"""Tells a verifier that is slow from one that hangs, while a call to it is under way and another could be asked.

A process that is stopped, or cut off, answers no health check either. One whose model hangs may go on answering: that
it is serving, until it finds out.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.rpc.errors import TandemError

Reply = TypeVar("Reply")


class Health(enum.Enum):
    """What a health check found. A server without health checks that says so is alive."""

    SERVING = "it says that it is serving"
    NOT_SERVING = "it says that it is not serving"
    SILENT = "it answers no health check either"


async def check_health(channel: grpc.aio.Channel, service: str, seconds: float) -> Health:
    """Asks the standard health service about `service` (without its package), over a channel that is in use."""
    stub: Any = health_pb2_grpc.HealthStub(channel)
    request = health_pb2.HealthCheckRequest(service=f"tandem.v1.{service}")
    try:
        reply = await stub.Check(request, timeout=seconds)
    except grpc.RpcError as error:
        unheard = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        return Health.SILENT if error.code() in unheard else Health.SERVING
    serving = reply.status == health_pb2.HealthCheckResponse.SERVING
    return Health.SERVING if serving else Health.NOT_SERVING


async def watch(
    what: str,
    check: Callable[[float], Awaitable[Health]],
    quiet: Callable[[], float],
    silence: Callable[[], float],
    stall: Callable[[], float] | None = None,
) -> TandemError:
    """Waits until a verifier is not worth waiting for, and says why.

    `what` has not been answered for `quiet()` seconds. From half of `silence()` on health is checked (`check(seconds)`)
    with as much time to answer. One that is serving may take `stall()` seconds, or as long as it likes.
    """
    while True:
        pause = silence() / 2
        if quiet() < pause:
            await asyncio.sleep(pause - quiet())
            continue
        health = await check(pause)
        waited = quiet()
        if waited < pause:
            continue  # it answered meanwhile
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
    """The answer to a call; after `seconds` without one it is watched. Raises what the call or the watch says first."""
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
