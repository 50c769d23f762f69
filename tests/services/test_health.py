"""Health that no reader can hold up: readers that never read, leave, or come in numbers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.rpc.channel import open_channel
from tandem.services.health import LONGEST_NAME, NOT_SERVING, SERVICE_UNKNOWN, SERVING, HealthService
from tandem.services.security.config import Security
from tandem.services.security.limits import ServerLimits
from tests.reliability.frames import unread
from tests.services.test_errors import refusal
from tests.support import listening, until

WATCH = "/grpc.health.v1.Health/Watch"
NAME = "tandem.v1.TargetVerifier"


def asking(service: str = "") -> health_pb2.HealthCheckRequest:
    return health_pb2.HealthCheckRequest(service=service)


@contextlib.asynccontextmanager
async def serving(
    health: HealthService, limits: ServerLimits | None = None
) -> AsyncIterator[tuple[str, health_pb2_grpc.HealthStub]]:
    health.set(SERVING, "", NAME)
    register = partial(health_pb2_grpc.add_HealthServicer_to_server, health)
    security = Security(limits=limits or ServerLimits())
    async with listening(register, security=security) as address, open_channel(address) as channel:
        yield address, health_pb2_grpc.HealthStub(channel)


async def check(stub: health_pb2_grpc.HealthStub, service: str = "") -> int:
    return int((await stub.Check(asking(service), timeout=20)).status)


async def test_a_reader_that_never_reads_holds_up_nobody() -> None:
    health = HealthService()
    async with serving(health) as (address, stub):
        readers = [await asyncio.to_thread(unread, address, WATCH, b"") for _ in range(3)]
        await until(lambda: health.watchers == 3)
        watch = stub.Watch(asking())
        assert (await watch.read()).status == SERVING
        health.set(NOT_SERVING, "", NAME)
        assert (await watch.read()).status == NOT_SERVING
        assert await check(stub) == await check(stub, NAME) == NOT_SERVING
        watch.cancel()
        for reader in readers:
            reader.close()
        await until(lambda: health.watchers == 0)


async def test_readers_that_never_read_count_until_their_connection_ends() -> None:
    health = HealthService()
    async with serving(health, ServerLimits(max_probes_per_caller=1)) as (address, stub):
        reader = await asyncio.to_thread(unread, address, WATCH, b"")
        await until(lambda: health.watchers == 1)
        refused = await refusal(stub.Watch(asking()))
        assert refused.code == "RESOURCE_EXHAUSTED" and "1 of yours are running" in refused.message
        assert await check(stub) == SERVING
        reader.close()
        await until(lambda: health.watchers == 0)
        watch = stub.Watch(asking())
        assert (await watch.read()).status == SERVING
        watch.cancel()


async def test_watchers_are_bounded_in_all_and_checks_are_not() -> None:
    health = HealthService()
    async with serving(health, ServerLimits(max_probes=2)) as (_, stub):
        watches = [stub.Watch(asking()) for _ in range(2)]
        for watch in watches:
            assert (await watch.read()).status == SERVING
        refused = await refusal(stub.Watch(asking()))
        assert refused.code == "RESOURCE_EXHAUSTED" and "2 are running, the limit is 2" in refused.message
        assert await check(stub) == SERVING
        watches[0].cancel()
        await until(lambda: health.watchers == 1)
        again = stub.Watch(asking())
        assert (await again.read()).status == SERVING
        again.cancel()
        watches[1].cancel()


async def test_a_service_that_is_not_here_is_not_found_by_a_check_and_unknown_to_a_watch() -> None:
    async with serving(HealthService()) as (_, stub):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await check(stub, "tandem.v1.DraftWorker")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        watch = stub.Watch(asking("tandem.v1.DraftWorker"))
        assert (await watch.read()).status == SERVICE_UNKNOWN
        watch.cancel()
        refused = await refusal(stub.Watch(asking("x" * (LONGEST_NAME + 1))))
        assert refused.code == "INVALID_ARGUMENT" and str(LONGEST_NAME) in refused.message
