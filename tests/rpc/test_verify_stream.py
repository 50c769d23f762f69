"""The pipelined client over real gRPC: the same tokens whatever breaks the stream."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import grpc
import pytest

import tandem.clients.distributed
from tandem.rpc.duplex import ENDED_MEANWHILE, StreamStatus
from tandem.rpc.errors import TandemError
from tandem.rpc.verifier_client import Deadlines, VerifierClient
from tandem.rpc.verify_stream import RoundStream
from tandem.speculation.retry import Persistence, RetryBudget
from tandem.speculation.rounds import RoundsLost
from tandem.speculation.types import Rule, SpeculationStats
from tandem.speculation.verification_mode import Depth, Pipeline
from tandem.v1 import target_verifier_pb2 as pb
from tandem.v1 import target_verifier_pb2_grpc
from tests.daily import daily
from tests.support import (
    GREEDY,
    HANG,
    SAMPLED,
    Site,
    answer,
    distributed,
    forget,
    ids,
    listening,
    oracle,
    run,
    target_site,
)

PROMPT = list(b"abcabcabcab")


@pytest.fixture
def depth(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Fixes how many rounds are in flight."""

    def fix(rounds: int) -> None:
        class Fixed(Depth):
            def of(self, k: int) -> int:
                return rounds if k else 1

        monkeypatch.setattr(tandem.clients.distributed, "Depth", Fixed)

    return fix


def pipelined(address: str, draft: str | None = "miss=0.2", **rest: Any) -> Any:
    return distributed(address, draft, pipeline=Pipeline.ON, **rest)


@pytest.mark.parametrize("seeds", daily([range(1), range(1, 4)], 0))
@pytest.mark.parametrize("rounds", daily([1, 2, 5], 1))
async def test_under_the_rejection_rule_tokens_are_those_of_stop_and_wait(
    rounds: int, seeds: Sequence[int], depth: Callable[[int], None]
) -> None:
    depth(rounds)
    warm = replace(SAMPLED, temperature=1.0)
    async with target_site() as site:
        for draft in ("miss=0.2", "salt=0"):
            async with distributed(site.address, draft) as (plain, _), pipelined(site.address, draft) as (ahead, _):
                for k in (1, 3, 5):
                    for seed in seeds:
                        request = ids(
                            PROMPT,
                            40,
                            sampling=replace(warm, seed=seed),
                            speculation_length=k,
                            rule=Rule.REJECTION,
                            ignore_end_of_sequence=True,
                        )
                        expected = await answer(plain.generate, request)
                        got = await answer(ahead.generate, request)
                        assert got.token_ids == expected.token_ids
                        assert got.completion.stats.accepted == expected.completion.stats.accepted


class Streaming:
    """A TargetVerifier in front of the real one's servicer whose streams do what `stream` says."""

    def __init__(self, site: Site, stream: Callable[[Any, Any, Any], AsyncIterator[Any]]) -> None:
        self._inner, self._stream = site.verifier, stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def VerifyStream(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        async with contextlib.aclosing(self._stream(self._inner, requests, context)) as replies:
            async for reply in replies:
                yield reply


@contextlib.asynccontextmanager
async def streaming_site(site: Site, stream: Callable[..., AsyncIterator[Any]]) -> AsyncIterator[str]:
    register = partial(target_verifier_pb2_grpc.add_TargetVerifierServicer_to_server, Streaming(site, stream))
    async with listening(register) as address:
        yield address


@pytest.mark.parametrize("how", ["UNAVAILABLE", "the end", "forgotten"])
async def test_a_stream_that_breaks_again_and_again_changes_no_token(how: str, depth: Callable[[int], None]) -> None:
    depth(4)
    streams = 0

    async def breaking(inner: Any, requests: Any, context: Any) -> AsyncIterator[Any]:
        nonlocal streams
        streams += 1
        answered = 0
        async for reply in inner.VerifyStream(requests, context):
            answered += 1
            if answered == 3 and how != "forgotten":
                if how == "the end":
                    return
                await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
            yield reply
            if answered == 3 and how == "forgotten":
                for session in inner.sessions:
                    await forget(inner, session.session_id)

    async with target_site() as site:
        async with streaming_site(site, breaking) as address, pipelined(address) as (generator, _):
            for sampling in (GREEDY, SAMPLED):
                got = await answer(generator.generate, ids(PROMPT, 40, sampling=sampling, speculation_length=2))
                assert got.token_ids == oracle(PROMPT, sampling, 40)
        assert streams > 4
        assert site.free == 4 and len(site.verifier.sessions) == 0


async def test_a_round_that_is_not_answered_in_time_is_an_error(depth: Callable[[int], None]) -> None:
    depth(2)

    async def silent(inner: Any, requests: Any, context: Any) -> AsyncIterator[Any]:
        await asyncio.sleep(30)
        yield

    async with target_site() as site:
        async with (
            streaming_site(site, silent) as address,
            pipelined(address, reconnect_seconds=0.3) as (generator, client),
        ):
            client.deadlines = Deadlines(verify=0.1)
            with pytest.raises(TandemError, match=r"DEADLINE_EXCEEDED: .* within 0\.1 s"):
                await answer(generator.generate, ids(PROMPT, 40))
        assert site.free == 4


def test_an_answer_that_comes_after_its_round_was_given_up_is_not_taken() -> None:
    async def test() -> None:
        late, taken, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def replies() -> AsyncGenerator[pb.VerifyResponse, None]:
            await late.wait()
            yield pb.VerifyResponse(committed_length=4, token_ids=[7])
            taken.set()
            await ended.wait()

        class Call:
            __aiter__ = staticmethod(replies)
            add_done_callback = Mock()
            write = AsyncMock()
            cancel = Mock(side_effect=ended.set)

        endpoint = SimpleNamespace(name="the target", stub=SimpleNamespace(VerifyStream=lambda metadata: Call()))
        session: Any = SimpleNamespace(metadata=(), endpoint=endpoint, patience=lambda endpoint: 0.01)
        stats = SpeculationStats()
        stream = RoundStream(session, stats)
        with pytest.raises(RoundsLost, match="no answer came"):
            await stream.send(pb.VerifyRequest(base_length=3))
        late.set()
        await taken.wait()
        assert stats.bytes_down == 0
        await stream.close()

    run(asyncio.wait_for(test(), 30))


async def test_a_stream_to_a_peer_that_never_answers_can_be_closed() -> None:
    silent = socket.create_server(("127.0.0.1", 0))  # its connections wait to be accepted
    client = VerifierClient(f"127.0.0.1:{silent.getsockname()[1]}", "")
    session: Any = SimpleNamespace(
        metadata=(),
        patience=lambda endpoint: HANG,
        client=client,
        endpoint=client.endpoint,
        retry_budget=RetryBudget(Persistence()),
        answer=None,
    )
    stream = RoundStream(session, SpeculationStats())
    round_ = stream.send(pb.VerifyRequest(base_length=3))
    await asyncio.sleep(0.05)  # the write has begun to wait
    await asyncio.wait_for(stream.close(), HANG)
    assert isinstance(round_.exception(), RoundsLost)
    await client.close()
    silent.close()


def a_stream(replies: Callable[[], AsyncGenerator[pb.VerifyResponse, None]]) -> RoundStream:
    """A stream whose server sends `replies`."""

    class Call:
        __aiter__ = staticmethod(replies)
        add_done_callback = Mock()
        write = AsyncMock()
        cancel = Mock(side_effect=lambda: stream._reading.cancel())

    endpoint = SimpleNamespace(name="the target", stub=SimpleNamespace(VerifyStream=lambda metadata: Call()))
    session: Any = SimpleNamespace(
        metadata=(),
        patience=lambda endpoint: HANG,
        endpoint=endpoint,
        retry_budget=RetryBudget(Persistence()),
        take_features=Mock(),
    )
    stream = RoundStream(session, SpeculationStats())
    return stream


async def test_an_answer_to_nothing_ends_the_stream_and_its_rounds_are_sent_again() -> None:
    async def replies() -> AsyncGenerator[pb.VerifyResponse, None]:
        yield pb.VerifyResponse(committed_length=4, token_ids=[7])

    stream = a_stream(replies)
    await asyncio.sleep(0.01)  # it is read
    with pytest.raises(RoundsLost, match="answers no open round"):
        await asyncio.wait_for(stream.send(pb.VerifyRequest(base_length=3)), HANG / 2)
    await stream.close()


METHOD = "/test/Stream"


class Refusing(grpc.GenericRpcHandler):
    """Answers the first message of a stream, then ends it with NOT_FOUND."""

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        return grpc.stream_stream_rpc_method_handler(self._answer)

    async def _answer(self, messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for message in messages:
            yield message
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such session", (("reason", "expired"),))


@pytest.fixture
def address() -> Iterator[str]:
    started, ending, found = threading.Event(), threading.Event(), []

    async def serve() -> None:
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((Refusing(),))
        found.append(server.add_insecure_port("127.0.0.1:0"))
        await server.start()
        started.set()
        while not ending.is_set():
            await asyncio.sleep(0.01)
        await server.stop(None)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    started.wait()
    yield f"127.0.0.1:{found[0]}"
    ending.set()
    thread.join()


async def ended_in_a_write(
    channel: grpc.aio.Channel, blocked: float
) -> tuple[StreamStatus, grpc.aio.AioRpcError] | None:
    """Writes to a stream whose end this thread could not notice, because it was blocked for so many seconds.

    Returns None if the end was noticed before, together with the answer.
    """
    call = channel.stream_stream(METHOD)()
    status = StreamStatus(call)
    await call.write(b"first")
    await call.read()
    if call.done():
        return None
    time.sleep(blocked)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call.write(b"second")
        await call.read()
        async for _ in call:
            pass
    return status, raised.value


def test_a_write_to_a_stream_that_has_ended_does_not_hide_why(address: str) -> None:
    async def test() -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            for blocked in (0.05 * 2 ** (n % 8) for n in range(24)):
                ended = await ended_in_a_write(channel, blocked)
                if ended is None:
                    continue
                status, raised = ended
                overwritten = (raised.code().name, raised.details()) == ENDED_MEANWHILE
                if overwritten and status.error(raised) is not raised:  # else the status itself never arrived
                    break
            else:
                pytest.fail("grpc.aio kept the status of every such stream: is StreamStatus not needed any more?")
            found = status.error(raised)
            assert (found.code(), found.details()) == (grpc.StatusCode.NOT_FOUND, "no such session")
            assert ("reason", "expired") in tuple(found.trailing_metadata())

    asyncio.run(test())
