"""What a call may take of the transport: its message in time, its replies read in time, so many calls."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import struct
from collections.abc import AsyncIterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.rpc import wire
from tandem.rpc.channel import TARGET, open_channel
from tandem.services.health import SERVING, HealthService
from tandem.services.security.access import Security
from tandem.services.security.call_limits import TransportInterceptor
from tandem.services.security.limits import ServerLimits
from tandem.services.server_duplex import StreamIdle, answered_in_order
from tandem.v1 import target_verifier_pb2 as pb
from tests.reliability import frames
from tests.services.test_identity import ByToken
from tests.services.test_limits import Wordy
from tests.support import (
    GREEDY,
    Refusal,
    answer,
    ids,
    listening,
    opening,
    oracle,
    raw_stub,
    refusal,
    run,
    target_site,
    toy,
    until,
    verifying,
)

GENERATE, OPEN, VERIFY_STREAM = (f"/tandem.v1.{TARGET}/{name}" for name in ("Generate", "OpenSession", "VerifyStream"))


def generating(count: int = 4, prompt: bytes = b"abc") -> pb.TargetVerifierGenerateRequest:
    return pb.TargetVerifierGenerateRequest(
        generation=wire.generation_to_wire(ids(prompt, count, ignore_end_of_sequence=True))
    )


class Bare:
    """A connection of our own frames, to a server that may send nothing: its window is 0."""

    @classmethod
    async def connect(cls, address: str) -> Bare:
        bare = cls()
        host, _, port = address.rpartition(":")
        bare.reader, bare.writer = await asyncio.open_connection(host, int(port))
        no_window = struct.pack(">HI", 4, 0)
        bare.writer.write(frames.PREFACE + frames.frame(frames.SETTINGS, 0, 0, no_window))
        bare.streams = 0
        return bare

    def call(self, path: str, message: bytes | None = None) -> int:
        """Begins a call; without a message it goes on waiting for one. Returns its stream's number."""
        number = 2 * self.streams + 1
        self.streams += 1
        self.writer.write(frames.frame(frames.HEADERS, frames.END_HEADERS, number, frames.headers(path)))
        if message is not None:
            self.writer.write(frames.frame(frames.DATA, frames.END_STREAM, number, frames.message(message)))
        return number

    async def ended(self, stream: int) -> None:
        """Reads until a stream ends."""
        while True:
            head = await self.reader.readexactly(9)
            await self.reader.readexactly(int.from_bytes(head[:3], "big"))
            kind, flags, number = head[3], head[4], int.from_bytes(head[5:], "big")
            if number == stream and (kind == frames.RST or (kind == frames.HEADERS and flags & frames.END_STREAM)):
                return

    def close(self) -> None:
        self.writer.close()


@contextlib.asynccontextmanager
async def bare(address: str) -> AsyncIterator[Bare]:
    connection = await Bare.connect(address)
    try:
        yield connection
    finally:
        connection.close()


# --- replies that nobody reads ---


async def test_finished_requests_whose_readers_never_read_hold_no_place() -> None:
    async with target_site(toy(slots=1), queue=2) as site, bare(site.address) as attacker:
        for n in range(6):
            attacker.call(GENERATE, generating().SerializeToString())
            await until(lambda n=n: site.lifecycle.running == n + 1 and not site.method.under_way)
        async with site.client() as client:
            assert (await answer(client.generate, ids(b"abc", 4))).token_ids == oracle(b"abc", GREEDY, 4)


async def test_replies_that_are_not_read_in_time_end_their_call(caplog: pytest.LogCaptureFixture) -> None:
    """A window of 0, which no status can pass either; and one that takes some, which then reads why."""
    security = Security(limits=ServerLimits(unread_seconds=0.1))
    caplog.set_level(logging.INFO)
    async with target_site(tokenizer=Wordy(), security=security) as site, bare(site.address) as attacker:
        attacker.call(GENERATE, generating().SerializeToString())
        await until(lambda: "replies were not read within" in caplog.text)
        async with raw_stub(site.address) as target:
            call = target.Generate(generating(100))
            await until(lambda: caplog.text.count("replies were not read within") == 2)
            await until(lambda: site.lifecycle.running == 0)

            found = await refusal(call)
    assert (found.code, found.reason) == ("DEADLINE_EXCEEDED", "NOT_READ")


async def test_some_places_are_kept_for_callers_who_have_none(tmp_path) -> None:
    callers = ByToken(tmp_path)
    async with (
        target_site(toy(slots=1), security=callers.security, queue=2) as site,
        raw_stub(site.address, TARGET, callers.credentials("alice")) as alice,
        raw_stub(site.address, TARGET, callers.credentials("bob")) as bob,
    ):
        held = site.engine.slots.take()
        waiting = [alice.Generate(generating()) for _ in range(3)]
        await until(lambda: site.method.under_way == 3)
        refused = [(await refusal(alice.Generate(generating()))).reason]
        waiting.append(bob.Generate(generating()))
        await until(lambda: site.method.under_way == 4)
        refused.append((await refusal(bob.Generate(generating()))).reason)
        site.engine.slots.release(held)
        for call in waiting:
            assert [reply async for reply in call]
    assert refused == ["QUEUE_FULL"] * 2


# --- requests that do not come, or are none ---


@pytest.mark.parametrize("path", [GENERATE, OPEN])
async def test_a_call_whose_request_never_comes_is_ended(path) -> None:
    security = Security(limits=ServerLimits(message_seconds=0.05))
    async with target_site(security=security) as site, bare(site.address) as attacker:
        await attacker.ended(attacker.call(path))


def test_bytes_that_are_no_message_are_refused_in_one_word_and_without_a_traceback(caplog) -> None:
    async def test() -> list[Refusal]:
        async with target_site() as site, open_channel(site.address) as channel:
            calls = channel.unary_unary(OPEN)(b"\xff\xff"), channel.unary_stream(GENERATE)(b"\xff\xff")
            return [await refusal(call) for call in calls]

    with caplog.at_level(logging.INFO):
        said = run(test())
    assert [(each.code, each.reason) for each in said] == [("INVALID_ARGUMENT", "NOT_A_MESSAGE")] * 2
    assert "Traceback" not in caplog.text and "Exception" not in caplog.text


class Parsing(grpc.GenericRpcHandler):
    """Counts how often a request is parsed."""

    def __init__(self) -> None:
        self.parsed = 0

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        def parse(data: bytes) -> bytes:
            self.parsed += 1
            return data

        async def unary(request: bytes, context: Any) -> bytes:
            return request

        async def stream(request: Any, context: Any) -> Any:
            yield request

        if details.method == GENERATE:
            return grpc.unary_stream_rpc_method_handler(stream, parse)
        if details.method == VERIFY_STREAM:
            return grpc.stream_stream_rpc_method_handler(stream, parse)
        return grpc.unary_unary_rpc_method_handler(unary, parse)


@pytest.mark.parametrize("path", [GENERATE, OPEN, VERIFY_STREAM])
async def test_without_a_token_nothing_of_a_request_is_waited_for_or_parsed(path, tmp_path) -> None:
    handlers, callers = Parsing(), ByToken(tmp_path)
    register = lambda server: server.add_generic_rpc_handlers((handlers,))  # noqa: E731
    async with listening(register, security=callers.security) as address:
        async with bare(address) as stranger:
            await stranger.ended(stranger.call(path))
            await stranger.ended(stranger.call(path, b"x" * 1000))
        assert handlers.parsed == 0
        async with open_channel(address, callers.credentials("alice")) as channel:
            await channel.unary_unary(OPEN)(b"x")
        assert handlers.parsed == 1


# --- so many calls ---


async def test_one_caller_has_so_many_calls_and_another_its_own(tmp_path) -> None:
    tokens = ByToken(tmp_path).security.tokens
    security = Security(tokens=tokens, limits=ServerLimits(max_calls_per_caller=2, max_calls=3))
    callers = ByToken(tmp_path)
    async with (
        target_site(security=security) as site,
        raw_stub(site.address, TARGET, callers.credentials("alice")) as one,
        raw_stub(site.address, TARGET, callers.credentials("alice")) as more,
        raw_stub(site.address, TARGET, callers.credentials("bob")) as bob,
    ):
        await one.OpenSession(opening())
        streams = [await answered_stream(one), await answered_stream(one)]
        refused = [await refusal(more.Verify(verifying()))]
        await bob.OpenSession(opening())
        streams.append(await answered_stream(bob))
        refused.append(await refusal(bob.Verify(verifying())))
        streams[0].cancel()
        await until_served(lambda: bob.Verify(verifying()))
        for stream in streams:
            stream.cancel()
    assert {(each.code, each.reason) for each in refused} == {("RESOURCE_EXHAUSTED", "IDENTITY_LIMIT")}
    alices, everybodys = (each.message for each in refused)
    assert alices == "calls: 2 of yours are running, the limit is 2"
    assert everybodys == "calls: 3 are running, the limit is 3"


async def answered_stream(stub: Any) -> Any:
    """A VerifyStream that has been answered once, and stays."""
    call = stub.VerifyStream()
    await call.write(verifying())
    assert (await call.read()).token_ids
    return call


async def until_served(call: Any) -> None:
    """A call that was cancelled ends at the server a little later."""
    for _ in range(1000):
        with contextlib.suppress(grpc.RpcError):
            await call()
            return
        await asyncio.sleep(0.002)
    raise AssertionError("never served")


async def test_probes_need_no_token_and_have_a_limit_of_their_own(tmp_path) -> None:
    callers, health = ByToken(tmp_path), HealthService()
    security = Security(tokens=callers.security.tokens, limits=ServerLimits(max_probes_per_caller=2))
    register = partial(health_pb2_grpc.add_HealthServicer_to_server, health)
    health.set(SERVING, "")
    async with listening(register, security=security) as address, open_channel(address) as channel:
        stub, request = health_pb2_grpc.HealthStub(channel), health_pb2.HealthCheckRequest()
        assert (await refusal(stub.Watch(request))).code == "UNIMPLEMENTED"
        async with bare(address) as slow:
            with pytest.raises(grpc.aio.AioRpcError, match="2 of yours are running, the limit is 2"):
                while True:
                    slow.call("/grpc.health.v1.Health/Check")  # refused while an answered call counts
                    assert (await stub.Check(request)).status == SERVING
        await until_served(lambda: stub.Check(request))


# --- streams without rounds ---


async def test_a_stream_without_rounds_ends_when_its_sessions_have() -> None:
    async with target_site(lease_seconds=0.1) as site, raw_stub(site.address) as target:
        call = target.VerifyStream()
        found = await refusal(call)
    assert (found.code, found.reason) == ("NOT_FOUND", "STREAM_IDLE")
    assert found.message == "no round came for 0.1 s: the sessions have expired"


async def test_a_round_that_takes_long_and_a_reader_that_takes_long_are_no_idleness() -> None:
    async def requests() -> AsyncIterator[int]:
        yield 1
        yield 2
        await asyncio.Event().wait()

    async def slow(request: int, arrived: float) -> int:
        await asyncio.sleep(0.08)
        return request

    replies = answered_in_order(requests(), slow, idle_seconds=0.05)
    said = [await anext(replies)]
    await asyncio.sleep(0.08)  # the reader takes its time
    said.append(await anext(replies))
    assert said == [1, 2]
    with pytest.raises(StreamIdle):
        await anext(replies)


# --- the clock behind it ---


async def test_a_reply_to_a_caller_who_has_left_ends_the_call_as_cancelled_and_closes_what_answers() -> None:
    """The core refuses to write to a call that has ended, with an error that would be logged with its traceback."""
    closed: list[bool] = []

    class Gone:
        def peer(self) -> str:
            return "ipv4:127.0.0.1:1"

        def auth_context(self) -> dict[str, Any]:
            return {}

        def set_trailing_metadata(self, metadata: Any) -> None: ...

        def time_remaining(self) -> None: ...

        async def write(self, reply: bytes) -> None:
            raise grpc.aio.InternalError("Failed grpc_call_start_batch")

    async def replies(requests: Any, context: Any) -> AsyncIterator[bytes]:
        try:
            yield b"reply"
        finally:
            closed.append(True)

    async def found(details: Any) -> Any:
        return grpc.stream_stream_rpc_method_handler(replies)

    details = SimpleNamespace(method=VERIFY_STREAM, invocation_metadata=())
    handler = await TransportInterceptor(ServerLimits()).intercept_service(found, details)
    with pytest.raises(asyncio.CancelledError):
        await handler.stream_stream(None, Gone())
    assert closed == [True]
