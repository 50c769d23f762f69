"""The pipelined client over real gRPC: the same tokens whatever breaks the stream."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock, Mock

import grpc
import pytest

import tandem.clients.distributed
from tandem.rpc.client_duplex import ENDED_MEANWHILE, StreamStatus
from tandem.rpc.received_errors import TandemError
from tandem.rpc.verifier_client import Deadlines, VerifierClient
from tandem.rpc.verify_stream import RoundStream
from tandem.speculation.retry import RetryBudget
from tandem.speculation.rounds import RoundsLost
from tandem.speculation.types import Rule, SpeculationStats
from tandem.speculation.verification_mode import Depth, Pipeline
from tandem.v1 import target_verifier_pb2 as pb
from tests.daily import daily
from tests.support import GREEDY, HANG, SAMPLED, answer, distributed, forget, ids, in_front, oracle, target_site, until

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
        async with in_front(site, VerifyStream=breaking) as address, pipelined(address) as (generator, _):
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
            in_front(site, VerifyStream=silent) as address,
            pipelined(address, reconnect_seconds=0.3) as (generator, client),
        ):
            client.deadlines = Deadlines(verify=0.1)
            with pytest.raises(TandemError, match=r"DEADLINE_EXCEEDED: .* within 0\.1 s"):
                await answer(generator.generate, ids(PROMPT, 40))
        assert site.free == 4


def a_stream(replies: Callable[[], AsyncGenerator[pb.VerifyResponse, None]], cancel: Any, patience: float) -> Any:
    """A stream whose server sends `replies`, and its statistics."""
    call = MagicMock(write=AsyncMock(), cancel=Mock(side_effect=lambda: cancel(stream)))
    call.__aiter__ = lambda _: replies()
    endpoint = SimpleNamespace(name="the target", stub=SimpleNamespace(VerifyStream=lambda metadata: call))
    session: Any = SimpleNamespace(metadata=(), endpoint=endpoint, patience=lambda endpoint: patience)
    stats = SpeculationStats()
    stream = RoundStream(session, stats)
    return stream, stats


async def test_an_answer_that_comes_after_its_round_was_given_up_is_not_taken() -> None:
    late, taken, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def replies() -> AsyncGenerator[pb.VerifyResponse, None]:
        await late.wait()
        yield pb.VerifyResponse(committed_length=4, token_ids=[7])
        taken.set()
        await ended.wait()

    stream, stats = a_stream(replies, lambda stream: ended.set(), 0.01)
    with pytest.raises(RoundsLost, match="no answer came"):
        await stream.send(pb.VerifyRequest(base_length=3))
    late.set()
    await asyncio.wait_for(taken.wait(), HANG)
    assert stats.bytes_down == 0
    await stream.close()


async def test_an_answer_to_nothing_ends_the_stream_and_its_rounds_are_sent_again() -> None:
    async def replies() -> AsyncGenerator[pb.VerifyResponse, None]:
        yield pb.VerifyResponse(committed_length=4, token_ids=[7])

    stream, _ = a_stream(replies, lambda stream: stream._reading.cancel(), HANG)
    await until(lambda: bool(stream.ended))
    with pytest.raises(RoundsLost, match="answers no open round"):
        await stream.send(pb.VerifyRequest(base_length=3))
    await stream.close()


async def test_a_stream_to_a_peer_that_never_answers_can_be_closed() -> None:
    silent = socket.create_server(("127.0.0.1", 0))  # its connections wait to be accepted
    client = VerifierClient(f"127.0.0.1:{silent.getsockname()[1]}", "")
    session: Any = SimpleNamespace(
        metadata=(),
        patience=lambda endpoint: HANG,
        client=client,
        endpoint=client.endpoint,
        retry_budget=RetryBudget(),
        answer=None,
    )
    stream = RoundStream(session, SpeculationStats())
    round_ = stream.send(pb.VerifyRequest(base_length=3))
    await asyncio.sleep(0.05)  # the write has begun to wait
    await asyncio.wait_for(stream.close(), HANG)
    assert isinstance(round_.exception(), RoundsLost)
    await client.close()
    silent.close()


def test_a_streams_own_status_is_kept_where_grpc_replaces_it() -> None:
    """grpc.aio makes it INTERNAL if a message is written after the end."""

    async def result(value: Any) -> Any:
        return value

    gone, call = grpc.StatusCode.NOT_FOUND, Mock()
    call.code, call.details = (lambda: result(gone)), (lambda: result("no such session"))
    call.initial_metadata, call.trailing_metadata = (lambda: result(())), (lambda: result((("reason", "expired"),)))
    status = StreamStatus(call)
    call.add_done_callback.call_args.args[0](call)
    found: Any = status.error(grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, (), (), ENDED_MEANWHILE[1]))
    assert (found.code(), found.details()) == (gone, "no such session")
    assert ("reason", "expired") in tuple(found.trailing_metadata())
