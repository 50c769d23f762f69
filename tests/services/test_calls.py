"""Calls followed to their status: what observers are told, and that none of them can harm a call."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import Mock

import grpc
import pytest

from tandem.engine.slots import NoFreeSlot
from tandem.rpc.channel import open_channel
from tandem.rpc.request_context import current
from tandem.services.calls import Call, CallObserver
from tandem.services.security.call_limits import TransportInterceptor
from tandem.services.security.limits import ServerLimits
from tandem.speculation.types import InvalidField
from tandem.v1 import target_verifier_pb2 as pb
from tandem.v1.target_verifier_pb2_grpc import (
    TargetVerifierServicer,
    TargetVerifierStub,
    add_TargetVerifierServicer_to_server,
)
from tests.support import HANG, until


class Service(TargetVerifierServicer):
    """Does what a session's id says."""

    async def CloseSession(self, request: pb.CloseSessionRequest, context: Any) -> pb.CloseSessionResponse:
        if request.session_id == "full":
            raise NoFreeSlot("all 4 KV slots are taken")
        if request.session_id == "invalid":
            raise InvalidField("prefix", "token id 4242 is outside the vocabulary of 258")
        if request.session_id == "broken":
            raise RuntimeError("secret")
        if request.session_id == "slow":
            await asyncio.sleep(10 * HANG)
        return pb.CloseSessionResponse(closed=True)

    async def VerifyStream(self, requests: Any, context: Any) -> AsyncIterator[pb.VerifyResponse]:
        async for request in requests:
            yield pb.VerifyResponse(committed_length=request.base_length)


class Told(CallObserver):
    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.pairs: list[tuple[int, int]] = []
        self.sizes: list[tuple[str, int]] = []

    def received(self, call: Call, message: Any, size: int | None) -> None:
        self.sizes.append(("in", size or 0))

    def sent(self, call: Call, size: int) -> None:
        self.sizes.append(("out", size))

    def replied(self, call: Call, request: Any, reply: Any, seconds: float) -> None:
        if call.method.endswith("VerifyStream"):
            self.pairs.append((request.base_length, reply.committed_length))
            assert seconds >= 0

    def ended(self, call: Call) -> None:
        self.calls.append(call)
        request = current()
        assert request and request.id == call.request_id


class Harmful(CallObserver):
    """Raises whenever it is told anything."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("an observer's own fault")


@contextlib.asynccontextmanager
async def serving(*observers: CallObserver) -> AsyncIterator[TargetVerifierStub]:
    server = grpc.aio.server(interceptors=[TransportInterceptor(ServerLimits(), observers)])
    port = server.add_insecure_port("127.0.0.1:0")
    add_TargetVerifierServicer_to_server(Service(), server)
    await server.start()
    try:
        async with open_channel(f"127.0.0.1:{port}") as channel:
            yield TargetVerifierStub(channel)
    finally:
        await server.stop(None)


def close(session_id: str) -> pb.CloseSessionRequest:
    return pb.CloseSessionRequest(session_id=session_id)


@pytest.mark.parametrize(
    "asked, code, reason, message",
    [
        ("fine", "OK", "", ""),
        ("full", "RESOURCE_EXHAUSTED", "NO_SLOT", "all 4 KV slots are taken"),
        ("invalid", "INVALID_ARGUMENT", "INVALID_FIELD", ""),
        ("broken", "INTERNAL", "", "internal error: RuntimeError"),
    ],
)
async def test_an_observer_is_told_the_status_and_its_reason_but_nothing_that_quotes_the_request(
    asked: str, code: str, reason: str, message: str
) -> None:
    told = Told()
    async with serving(told) as stub:
        with contextlib.suppress(grpc.RpcError):
            await stub.CloseSession(close(asked))
        await until(lambda: len(told.calls) == 1)
    call = told.calls[0]
    assert (call.method, call.code, call.reason, call.message) == ("TargetVerifier/CloseSession", code, reason, message)


async def test_a_deadline_and_a_caller_that_leaves_are_told_apart() -> None:
    told = Told()
    async with serving(told) as stub:
        await stub.CloseSession(close("fine"))
        with pytest.raises(grpc.RpcError):
            await stub.CloseSession(close("slow"), timeout=1.0)
        await until(lambda: len(told.calls) == 2)
        received = len(told.sizes)
        left = stub.CloseSession(close("slow"))
        await until(lambda: len(told.sizes) > received)
        left.cancel()
        await until(lambda: len(told.calls) == 3)
    assert [call.code for call in told.calls] == ["OK", "DEADLINE_EXCEEDED", "CANCELLED"]


async def test_each_reply_of_a_stream_is_told_with_the_request_that_it_answers_and_every_byte_is_counted() -> None:
    rounds = [pb.VerifyRequest(base_length=n) for n in (5, 500, 50_000)]
    told = Told()
    async with serving(told) as stub:
        replies = [reply async for reply in stub.VerifyStream(iter(rounds))]
        assert len(replies) == 3
        assert sum(size for way, size in told.sizes if way == "in") == sum(r.ByteSize() for r in rounds)
        assert sum(size for way, size in told.sizes if way == "out") == sum(r.ByteSize() for r in replies)
    assert told.pairs == [(5, 5), (500, 500), (50_000, 50_000)]
    assert [call.code for call in told.calls] == ["OK"]


async def test_an_observer_that_fails_harms_neither_the_call_nor_the_other_observers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told = Told()
    async with serving(Harmful(), told) as stub:
        assert (await stub.CloseSession(close("fine"))).closed
        assert len([r async for r in stub.VerifyStream(iter([pb.VerifyRequest(base_length=1)]))]) == 1
    assert len(told.calls) == 2
    assert "an observer failed" in caplog.text


async def test_a_call_that_begins_as_the_server_stops_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    told, stopped = Told(), type("_ServerStoppedError", (grpc.aio.BaseError,), {})  # as gRPC's own, which is private
    call = Call("/tandem.v1.TargetVerifier/Verify", (), TransportInterceptor(ServerLimits(), [told]))
    with pytest.raises(stopped):
        async with call.answered(Mock(time_remaining=lambda: None, auth_context=dict)):
            raise stopped
    assert [call.code for call in told.calls] == ["CANCELLED"] and not caplog.records


def test_of_a_runs_messages_only_the_newest_is_kept() -> None:
    """A client may send as many as it likes, whatever limit they state."""

    server = TransportInterceptor(ServerLimits(), [CallObserver()])
    call = Call("/tandem.v1.TargetVerifier/VerifyStream", (), server, dialogue=True)
    for base in range(100):
        call.received(pb.VerifyRequest(base_length=base, run_until=0))
    assert [request.base_length for request, _ in call.unanswered] == [99]


def test_each_step_of_a_reply_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """Its further steps were logged within it and beside it."""
    server = TransportInterceptor(ServerLimits(), log_prompts=True)
    call = Call("/tandem.v1.TargetVerifier/VerifyStream", (), server, dialogue=True)
    reply = pb.VerifyResponse(token_ids=[7000], next_steps=[pb.VerifyResponse(token_ids=[7001 + n]) for n in range(2)])
    with caplog.at_level(logging.INFO, "tandem.prompts"):
        call.received(pb.VerifyRequest(base_length=1, run_until=9))
        call.replied(reply)
    assert [caplog.text.count(f"token_ids: {token}") for token in (7000, 7001, 7002)] == [1, 1, 1]
    assert len(reply.next_steps) == 2
