"""The distributed client: its session, its retries, its accounts; against servers that lose, forget and delay."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import pytest

from tandem.rpc.errors import TandemError
from tandem.rpc.verifier_client import Deadlines, VerifierClient
from tandem.speculation.retry import Persistence
from tandem.speculation.rounds import OutOfStep
from tandem.speculation.types import Request, SpeculationStats
from tandem.v1 import target_verifier_pb2 as pb
from tandem.v1 import target_verifier_pb2_grpc
from tests.support import (
    GREEDY,
    SAMPLED,
    RemoteRounds,
    RoundByRound,
    Site,
    distributed,
    listening,
    oracle,
    remote_verifier,
    run,
    target_site,
)

PROMPT = list(b"the prompt")
PLAIN = Request(GREEDY)


@contextlib.asynccontextmanager
async def verifier(
    address: str, deadlines: Deadlines | None = None, request: Request = PLAIN
) -> AsyncIterator[tuple[RemoteRounds, SpeculationStats]]:
    client, stats = VerifierClient(address, "toy", deadlines, Persistence(0.3)), SpeculationStats()
    try:
        yield remote_verifier(client, request, stats), stats
    finally:
        await client.close()


class Faulty(RoundByRound):
    """A TargetVerifier in front of the real one's servicer; `fault` sees every Verify."""

    def __init__(self, site: Site, fault: Callable[[Any, Any, Any], Any]) -> None:
        self._inner, self._fault = site.verifier, fault

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def Verify(self, request: Any, context: Any) -> Any:
        return await self._fault(self._inner, request, context)


@contextlib.asynccontextmanager
async def faulty_site(site: Site, fault: Callable[[Any, Any, Any], Any]) -> AsyncIterator[str]:
    register = partial(target_verifier_pb2_grpc.add_TargetVerifierServicer_to_server, Faulty(site, fault))
    async with listening(register) as address:
        yield address


def test_a_session_is_opened_verified_and_closed_and_every_byte_counted() -> None:
    truth = oracle(PROMPT, SAMPLED, 4)

    async def test() -> None:
        async with (
            target_site() as site,
            verifier(site.address, request=Request(SAMPLED, margins=True)) as (remote, stats),
        ):
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

    run(test())


def test_a_verifier_that_stays_out_of_step_is_an_error_that_names_both_lengths() -> None:
    async def stale(inner: Any, request: Any, context: Any) -> Any:
        return pb.VerifyResponse(stale=True, committed_length=4)

    async def test() -> None:
        async with target_site() as site, faulty_site(site, stale) as address, verifier(address) as (remote, _):
            await remote.open(PROMPT)
            with pytest.raises(OutOfStep, match=r"10 is stale: .* 4 tokens"):
                await remote.verify(PROMPT, [])

    run(test())


def test_a_target_that_is_not_there_is_waited_for_and_then_named() -> None:
    async def test() -> None:
        began = time.monotonic()
        with pytest.raises(ValueError, match=r"nothing listens at 127\.0\.0\.1:1 "):
            client = VerifierClient("127.0.0.1:1", "toy")
            try:
                await client.model_info(0.2)
            except TandemError as error:
                raise ValueError(str(error)) from None
            finally:
                await client.close()
        assert time.monotonic() - began > 0.15

    run(test())


def test_a_draft_of_another_tokenizer_is_refused_before_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with target_site() as site:
            monkeypatch.setattr("tests.toy.ToyTokenizer.sha256", "another")
            with pytest.raises(ValueError, match="must share a vocabulary"):
                async with distributed(site.address):
                    pass
            assert site.engine.batcher.steps == 0

    run(test())
