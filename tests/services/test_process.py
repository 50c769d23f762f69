"""The life of a server process: readiness, reflection, SIGTERM, a port that is taken (G11)."""

from __future__ import annotations

import asyncio
import csv
import json
import os
import signal
import time
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tandem.engine.engine import Engine
from tandem.engine.load_models import Loaded
from tandem.rpc.channel import DRAFT, FUSED, TARGET, open_channel
from tandem.rpc.generation_client import GenerationClient
from tandem.rpc.received_errors import TandemError
from tandem.services.server_roles import run_role
from tests.daily import daily
from tests.support import (
    GREEDY,
    HANG,
    answer,
    ids,
    launch,
    opening,
    oracle,
    raw_stub,
    role_configured,
    run,
    server_process,
    toy,
    until,
)
from tests.toy import ToyRunner, ToyTokenizer


async def health(address: str, service: str = "") -> int:
    async with open_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        reply = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=HANG)
        return reply.status


async def drains(address: str, pid: int) -> None:
    """A serving process is asked to stop, and stops serving."""
    assert await health(address) == health_pb2.HealthCheckResponse.SERVING
    os.kill(pid, signal.SIGTERM)
    while await health(address) != health_pb2.HealthCheckResponse.NOT_SERVING:
        await asyncio.sleep(0.01)


async def services(address: str) -> set[str]:
    """What reflection lists."""
    async with open_channel(address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        async for reply in call:
            return {service.name for service in reply.list_services_response.service}
    return set()


def test_a_target_process_from_readiness_to_the_end(tmp_path: Path) -> None:
    """Ready, listed, refusing a second server on its port; then SIGTERM under a running stream."""

    async def talk(address: str) -> None:
        serving = health_pb2.HealthCheckResponse.SERVING
        assert await health(address) == await health(address, "tandem.v1.TargetVerifier") == serving
        with pytest.raises(grpc.RpcError) as caught:
            await health(address, "tandem.v1.DraftWorker")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert {"tandem.v1.TargetVerifier", "grpc.health.v1.Health"} <= await services(address)

    async def stop_under_load(address: str, pid: int) -> None:
        async with GenerationClient.connect(address, TARGET) as client:
            stream = client.generate(ids(b"abc", 100, ignore_end_of_sequence=True))
            await anext(stream)
            await drains(address, pid)
            with pytest.raises(TandemError, match="stopping") as caught:
                await answer(client.generate, ids(b"new"))
            assert caught.value.code == "UNAVAILABLE"
            rest = [token async for event in stream for token in getattr(event, "token_ids", ())]
            truth = oracle(b"abc", GREEDY, 100, past_the_end=True)
            assert tuple(rest) == truth[len(truth) - len(rest) :] and len(rest) > 90

    role = ("--role", "target", "--model", "step=0.02", "--sequence_length", "128", "--drain_seconds", "600")
    with server_process(tmp_path, *role) as server:
        address = server.wait_ready()
        ready = json.loads(server.ready_file.read_text())
        assert ready["startup_seconds"] > 0
        run(talk(address))

        second = launch(tmp_path, "--role", "target", "--backend", "toy", "--port", str(server.port))
        assert second.returncode == 2
        (line,) = second.stderr.splitlines()
        assert address in line

        run(stop_under_load(address, server.process.pid))
        assert server.process.wait(HANG) == 0
        assert "Traceback" not in server.log.read_text()


def test_sigterm_waits_for_a_session_no_longer_than_the_drain_seconds(tmp_path: Path) -> None:
    async def open_session(address: str) -> None:
        async with raw_stub(address) as target:
            await target.OpenSession(opening())

    with server_process(tmp_path, "--role", "target", "--drain_seconds", "0.3", "--lease_seconds", "600") as server:
        run(open_session(server.wait_ready()))
        began = time.monotonic()
        assert server.stop() == 0  # within what is a hang
        assert time.monotonic() - began > 0.25


def test_a_second_signal_ends_a_draining_server_at_once(tmp_path: Path) -> None:
    async def stop_twice(address: str, pid: int) -> None:
        async with GenerationClient.connect(address, TARGET) as client:
            stream = client.generate(ids(b"abc", 100, ignore_end_of_sequence=True))
            await anext(stream)
            await drains(address, pid)
            os.kill(pid, signal.SIGTERM)
            await stream.aclose()

    with server_process(tmp_path, "--role", "target", "--model", "step=0.05") as server:
        run(stop_twice(server.wait_ready(), server.process.pid))
        assert server.process.wait(HANG) == -signal.SIGTERM


async def test_nothing_is_ready_before_the_warm_up_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the ready file is there nor a call answered while the model still warms up."""
    ready_file = tmp_path / "ready.json"
    seen: list[bool] = []

    async def slow_load(*_: object) -> object:
        batcher = _[1]
        runner: ToyRunner = toy()
        await batcher.on_device(time.sleep, 0.3)
        seen.append(ready_file.exists())
        return Loaded(Engine(runner, batcher), ToyTokenizer())

    monkeypatch.setattr("tandem.services.server_roles.load", slow_load)

    config = role_configured("target", ready_file=str(ready_file))
    server = asyncio.create_task(run_role("target", config))
    took = await until(ready_file.exists)
    assert took >= 0.3
    ready = json.loads(ready_file.read_text())
    assert await health(f"127.0.0.1:{ready['port']}") == health_pb2.HealthCheckResponse.SERVING
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(server, HANG)
    assert seen == [False]


async def test_a_signal_while_the_model_loads_ends_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loading = asyncio.Event()

    async def load_forever(*_: object) -> object:
        loading.set()
        await asyncio.sleep(10 * HANG)
        raise AssertionError

    monkeypatch.setattr("tandem.services.server_roles.load", load_forever)

    server = asyncio.create_task(run_role("target", role_configured("target")))
    await asyncio.wait_for(loading.wait(), HANG)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(server, HANG)


@pytest.mark.parametrize(("role", "service"), daily([("fused_target", FUSED), ("draft_worker", DRAFT)], 1))
def test_the_other_servers_are_ready_listed_and_stop_too(tmp_path: Path, role: str, service: str) -> None:
    async def talk(address: str) -> None:
        assert await health(address, f"tandem.v1.{service}") == health_pb2.HealthCheckResponse.SERVING
        assert f"tandem.v1.{service}" in await services(address)
        async with GenerationClient.connect(address, service) as client:
            info = await client.model_info()
            assert (info.backend, info.vocab_size, info.kv_slots) == ("toy", 258, 2)
            assert info.startup_seconds > 0
            requests = [ids([65 + i], 12, speculation_length=3, ignore_end_of_sequence=True) for i in range(3)]
            answers = await asyncio.gather(*(answer(client.generate, request) for request in requests))
        assert [a.token_ids for a in answers] == [oracle([65 + i], GREEDY, 12, past_the_end=True) for i in range(3)]

    drafting = ("--role", role, "--draft_model", "miss=0.3", "--batch", "2", "--profile")
    with server_process(tmp_path, "--role", "target", "--batch", "2", ready_file="target.json") as target:
        host = ("--target_host", target.wait_ready(), "--pipeline", "off") if role == "draft_worker" else ()
        with server_process(tmp_path, *drafting, *host) as server:
            run(talk(server.wait_ready()))
            assert server.stop() == 0
            assert "Traceback" not in server.log.read_text()
    (table,) = tmp_path.glob("performance_*.csv")
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(json.loads(table.with_suffix(".json").read_text())) == 3
    assert all(int(row["drafted"]) > 0 for row in rows)
