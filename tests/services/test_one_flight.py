"""A run may begin in one flight with the opening of its session: the first token takes one round trip.

Whatever becomes of the opening, the run does as well, and what the caller sees is what OpenSession said.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any, ClassVar

import grpc
import pytest

from tandem.comparison.links.link import DelayLink
from tandem.comparison.links.link_settings import LinkSettings
from tandem.engine.generator import Generator
from tandem.rpc.received_errors import TandemError
from tandem.services.server_duplex import MAX_AHEAD
from tandem.services.sessions.table import SessionConflict
from tandem.services.statuses import ModelMismatch, VocabularyMismatch
from tandem.services.target_verifier import TargetVerifierService
from tandem.speculation.types import Chunk, InvalidField, TooLong
from tandem.speculation.verification_mode import Pipeline
from tandem.v1 import target_verifier_pb2 as pb
from tests.services.test_runs import running
from tests.support import PROMPT, answer, distributed, ids, opening, raw_stub, refusal, target_site, until

RTT = 0.4
NEVER = Pipeline.NEVER_WAITING


class Watched(TargetVerifierService):
    """Notes the calls, and the messages of streams, in the order in which they come."""

    seen: ClassVar[list[Any]] = []  # of the newest server

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.seen.clear()

    async def OpenSession(self, request: Any, context: Any) -> Any:
        self.seen.append(request)
        return await super().OpenSession(request, context)

    def VerifyStream(self, requests: Any, context: Any) -> Any:
        async def noted() -> AsyncIterator[Any]:
            async for request in requests:
                self.seen.append(request)
                yield request

        return super().VerifyStream(noted(), context)


@pytest.fixture(autouse=True)
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, Watched)


def serve(monkeypatch: pytest.MonkeyPatch, kind: type[TargetVerifierService]) -> None:
    monkeypatch.setattr("tests.support.TargetVerifierService", kind)


async def seconds_to_first_token(generator: Generator) -> float:
    began = time.perf_counter()
    async with contextlib.aclosing(generator.generate(ids(PROMPT, 12))) as events:
        async for event in events:
            if isinstance(event, Chunk):
                return time.perf_counter() - began
    raise AssertionError("no token came")


async def test_the_first_token_takes_one_round_trip() -> None:
    """At 200 ms each way. The best of three: a machine that is busy only adds."""
    async with target_site() as site, DelayLink() as link:
        await link.set(LinkSettings(RTT * 1000))
        async with distributed(await link.listen(site.address), pipeline=NEVER) as (generator, _):
            took = min([await seconds_to_first_token(generator) for _ in range(3)])
            assert RTT <= took < 1.8 * RTT
        await until(lambda: site.free == 4)


# --- openings that are refused ---


class Refuses(Watched):
    error: Exception

    async def OpenSession(self, request: Any, context: Any) -> Any:
        raise self.error


@pytest.mark.parametrize(
    "error",
    [
        InvalidField("adapter", "there is none of this name"),
        TooLong("the prefix is too long"),
        VocabularyMismatch("other tokens"),
        ModelMismatch("other weights"),
        SessionConflict("it is open already"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_a_refused_opening_is_the_requests_error_as_without_a_run(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    serve(monkeypatch, Refuses)
    monkeypatch.setattr(Refuses, "error", error, raising=False)

    async def refused(pipeline: Pipeline) -> tuple[str, str, str]:
        async with target_site() as site, distributed(site.address, pipeline=pipeline) as (generator, client):
            tasks = len(asyncio.all_tasks())
            with pytest.raises(TandemError) as caught:
                await answer(generator.generate, ids(PROMPT, 12))
            assert (len(site.verifier.sessions), site.free) == (0, 4)
            await client.closes.settle()
            await until(lambda: len(asyncio.all_tasks()) <= tasks)
            return caught.value.code, caught.value.reason, caught.value.message.replace(site.address, "there")

    assert await refused(NEVER) == await refused(Pipeline.OFF)


# --- the wire ---


async def test_a_run_whose_session_never_opens_ends_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.services.verify_runs.OPENING_COMES", 0.05)
    async with target_site() as site, raw_stub(site.address) as target:
        tasks = len(asyncio.all_tasks())
        for name in ("guessed", "s" * 128):
            call = target.VerifyStream()
            await call.write(running(PROMPT, session_id=name, opening_sent=True))
            assert (await refusal(call)).code == "NOT_FOUND"
        await until(lambda: len(asyncio.all_tasks()) <= tasks)
        assert (len(site.verifier.sessions), site.free) == (0, 4)


async def test_a_run_whose_opening_fails_after_its_slot_was_taken_does_not_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The opening holds the session when the run comes to it: without the opening's parameters no step is made."""
    async with target_site() as site, raw_stub(site.address) as target:

        async def processing(*arguments: Any) -> None:
            await until(lambda: next(iter(site.verifier.sessions)).in_use == 2)
            raise InvalidField("sampling", "it cannot be compiled")

        monkeypatch.setattr(site.engine, "processing", processing)
        call = target.VerifyStream()
        await call.write(running(PROMPT, opening_sent=True))
        await until(lambda: len(Watched.seen) == 1)
        refused = await refusal(target.OpenSession(opening("s")))
        assert (refused.code, refused.reason) == ("INVALID_ARGUMENT", "INVALID_FIELD")
        late = await refusal(call)
        assert late.code == "NOT_FOUND" and late.message == "no session s: its opening failed"
        await until(lambda: (len(site.verifier.sessions), site.free) == (0, 4))
        again = await refusal(target.Verify(pb.VerifyRequest(session_id="s", base_length=1)))
        assert again.code == "NOT_FOUND"


async def test_messages_that_come_before_the_opening_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.services.verify_runs.OPENING_COMES", 1.0)
    async with target_site() as site, raw_stub(site.address) as target:
        call = target.VerifyStream()

        async def flood() -> None:
            while True:
                await call.write(running(PROMPT, [1] * 5, stop_token_ids=[1] * 10_000, opening_sent=True))

        with pytest.raises((grpc.RpcError, asyncio.InvalidStateError)):  # writes wait until the call has ended
            await flood()
        assert len(Watched.seen) <= MAX_AHEAD + 3
