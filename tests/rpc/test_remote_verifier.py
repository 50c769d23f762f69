"""The distributed client: its session, its retries, its accounts; against servers that lose, forget and delay."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Collection
from typing import Any

import grpc
import pytest

from tandem.rpc.received_errors import TandemError
from tandem.rpc.remote_session import RemoteSession
from tandem.rpc.verifier_client import Deadlines, VerifierClient
from tandem.services.statuses import SessionExpired
from tandem.speculation.rounds import OutOfStep
from tandem.speculation.types import Request, SpeculationStats
from tandem.v1 import generation_pb2
from tandem.v1 import target_verifier_pb2 as pb
from tandem.v1.target_verifier_pb2_grpc import TargetVerifierServicer, add_TargetVerifierServicer_to_server
from tests.support import (
    GREEDY,
    SAMPLED,
    RemoteRounds,
    distributed,
    in_front,
    listening,
    oracle,
    remote_verifier,
    target_site,
    until,
)

PROMPT = list(b"the prompt")
PLAIN = Request(GREEDY)


@contextlib.asynccontextmanager
async def verifier(
    address: str, deadlines: Deadlines | None = None, request: Request = PLAIN
) -> AsyncIterator[tuple[RemoteRounds, SpeculationStats]]:
    client, stats = VerifierClient(address, "toy", deadlines, 0.3), SpeculationStats()
    try:
        yield remote_verifier(client, request, stats), stats
    finally:
        await client.close()


async def test_a_session_is_opened_verified_and_closed_and_every_byte_counted() -> None:
    truth = oracle(PROMPT, SAMPLED, 4)
    async with target_site() as site, verifier(site.address, request=Request(SAMPLED, margins=True)) as (remote, stats):
        await remote.open(PROMPT)
        (session,) = site.verifier.sessions
        assert session.tokens == PROMPT and session.request.sampling == SAMPLED
        opened = stats.bytes_up
        assert opened > len(PROMPT)
        verdict = await remote.verify(PROMPT, truth[:3])
        assert (verdict.token_ids, verdict.accepted, len(verdict.margins)) == (truth, 3, 4)
        assert 0 < stats.bytes_up - opened < 70
        assert stats.bytes_down > 0 and stats.network_seconds > 0
        assert verdict.compute_seconds > 0
        await remote.close()
        await remote.close()
        assert site.free == 4 and len(site.verifier.sessions) == 0


async def test_a_verifier_that_stays_out_of_step_is_an_error_that_names_both_lengths() -> None:
    async def stale(inner: Any, request: Any, context: Any) -> Any:
        return pb.VerifyResponse(stale=True, committed_length=4)

    async with target_site() as site, in_front(site, Verify=stale) as address, verifier(address) as (remote, _):
        await remote.open(PROMPT)
        with pytest.raises(OutOfStep, match=r"10 is stale: .* 4 tokens"):
            await remote.verify(PROMPT, [])


async def test_a_target_that_is_not_there_is_waited_for_and_then_named() -> None:
    began = time.monotonic()
    client = VerifierClient("127.0.0.1:1", "toy")
    with pytest.raises(TandemError, match=r"nothing listens at 127\.0\.0\.1:1 "):
        await client.model_info(0.2)
    await client.close()
    assert time.monotonic() - began > 0.15


async def test_a_draft_of_another_tokenizer_is_refused_before_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    async with target_site() as site:
        monkeypatch.setattr("tests.toy.ToyTokenizer.sha256", "another")
        with pytest.raises(ValueError, match="must share a vocabulary"):
            async with distributed(site.address):
                pass
        assert site.engine.batcher.steps == 0


PREFIX = [1, 2, 3]


class Scripted(TargetVerifierServicer):
    """Says what `info` is, and to each Verify what is next in `rounds`; notes its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.info: dict[str, Any] = {"model_name": "m", "weights_revision": "r", "tokenizer_sha256": "toy"}
        self.info |= {"backend": "toy", "vocab_size": 258, "max_sequence_length": 100}
        self.rounds: list[grpc.StatusCode] = []

    async def GetModelInfo(self, request: Any, context: Any) -> Any:
        self.calls.append("GetModelInfo")
        return pb.TargetVerifierGetModelInfoResponse(model=generation_pb2.ModelInfo(**self.info))

    async def OpenSession(self, request: Any, context: Any) -> Any:
        self.calls.append("OpenSession")
        return pb.OpenSessionResponse(committed_length=len(request.prefix))

    async def CloseSession(self, request: Any, context: Any) -> Any:
        return pb.CloseSessionResponse(closed=True)

    async def VerifyStream(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        async for request in requests:
            yield await self.Verify(request, context)

    async def Verify(self, request: Any, context: Any) -> Any:
        self.calls.append("Verify")
        if self.rounds:
            await context.abort(self.rounds.pop(0), SessionExpired.__name__)
        return pb.VerifyResponse(committed_length=request.base_length + 1, token_ids=[7])


@contextlib.asynccontextmanager
async def two() -> AsyncIterator[tuple[Scripted, Scripted, VerifierClient, RemoteRounds]]:
    """Two verifiers, a client of both, and a session that is open at the first."""
    async with contextlib.AsyncExitStack() as stack:
        servers, addresses = [Scripted(), Scripted()], []
        for server in servers:
            register = lambda to, server=server: add_TargetVerifierServicer_to_server(server, to)  # noqa: E731
            addresses.append(await stack.enter_async_context(listening(register)))
        client = VerifierClient(",".join(addresses), "toy", Deadlines(stall=60.0), 5.0)
        stack.push_async_callback(client.close)
        await client.model_info()
        client.pool.current = addresses[0]
        for endpoint in client.endpoints.values():
            endpoint.suspect = False
        session = remote_verifier(client, Request(GREEDY))
        await session.open(PREFIX)
        for server in servers:
            server.calls.clear()
        yield *servers, client, session  # type: ignore[misc]
        await session.close()


async def test_a_lease_that_ran_out_is_no_failure_of_its_verifier(caplog: pytest.LogCaptureFixture) -> None:
    """G5: the session is opened again where it was, and new requests go there too."""
    async with two() as (first, second, client, session):
        first.rounds = [grpc.StatusCode.NOT_FOUND]
        verdict = await session.verify(PREFIX, [])
        assert verdict.token_ids == (7,)
        assert client.address == client.pool.addresses[0], "its verifier counts as failed"
        assert first.calls == ["Verify", "GetModelInfo", "OpenSession", "Verify"] and not second.calls
    assert " failed (" not in caplog.text


async def test_a_verifier_that_failed_says_again_what_it_runs_before_it_is_trusted() -> None:
    """G8: what answers at its address may be another server, with another device, which an opening would not tell."""
    async with two() as (first, second, _, session):
        first.rounds = [grpc.StatusCode.UNAVAILABLE]
        await session.verify(PREFIX, [])
        assert second.calls == ["OpenSession", "Verify"]
        first.info["backend"] = "other"
        second.rounds, second.info["backend"] = [grpc.StatusCode.UNAVAILABLE], "other"
        with pytest.raises(TandemError, match="its backend is 'other', but this client started with 'toy'") as caught:
            await session.verify([*PREFIX, 7], [])
        assert caught.value.code == "FAILED_PRECONDITION"
        assert first.calls == ["Verify", "GetModelInfo"], "a session was opened at another model"


GONE = TandemError("UNAVAILABLE", "gone")


class Servers(RemoteSession):
    """`scripts`: what each server does, one entry for each time that it is asked: an answer, an error, or a wait."""

    def __init__(self, give_up_after: int, **scripts: list[Any]) -> None:
        self.scripts, self.give_up_after = scripts, give_up_after
        self.asked, self.failures = list[str](), list[str]()

    async def _open_at(self, name: str, prefix: Any, others: Any) -> str:
        self.asked.append(name)
        step = self.scripts[name].pop(0)
        if isinstance(step, Exception):
            raise step
        if isinstance(step, asyncio.Event):
            await step.wait()
            return f"{name} at last"
        return f"{step}"

    def _following(self, asked: Collection[str]) -> str | None:
        return next((name for name, left in self.scripts.items() if left and name not in asked), None)

    def _pause(self, name: str, error: TandemError, prefix: Any) -> float:
        self.failures.append(name)
        if len(self.failures) >= self.give_up_after:
            raise error
        return 0.0

    def _before_another(self, more: float = 0.0) -> float:
        return 0.001


async def test_one_that_failed_is_asked_again_while_another_is_slow() -> None:
    servers = Servers(100, a=[asyncio.Event()], b=[GONE, GONE, "yes"])
    assert await servers._first(()) == ("b", "yes")
    assert servers.asked == ["a", "b", "b", "b"]


async def test_giving_up_on_others_does_not_end_what_is_under_way() -> None:
    done = asyncio.Event()
    servers = Servers(2, a=[done], b=[GONE, GONE, "never"])
    racing = asyncio.create_task(servers._first(()))
    await until(lambda: len(servers.failures) == 2)
    done.set()
    assert await racing == ("a", "a at last")
    assert servers.asked == ["a", "b", "b"]
