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
from tandem.comparison.links.settings import LinkSettings
from tandem.engine.generator import Generator
from tandem.rpc.errors import TandemError
from tandem.services.duplex import MAX_AHEAD
from tandem.services.errors import ModelMismatch, VocabularyMismatch
from tandem.services.sessions.table import SessionConflict
from tandem.services.target_verifier import TargetVerifierService
from tandem.speculation.types import Chunk, InvalidField, TooLong
from tandem.speculation.verification_mode import Pipeline
from tandem.v1 import target_verifier_pb2 as pb
from tests.daily import daily
from tests.services.test_errors import refusal
from tests.services.test_runs import running, status
from tests.services.test_target_verifier import PROMPT, opening
from tests.support import (
    answer,
    distributed,
    ids,
    raw_stub,
    target_site,
    until,
)

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
                yield self.came(request)

        return super().VerifyStream(noted(), context)

    def came(self, request: Any) -> Any:
        return request

    @classmethod
    def openings(cls) -> int:
        return sum(isinstance(each, pb.OpenSessionRequest) for each in cls.seen)

    @classmethod
    def early(cls) -> int:
        return sum(isinstance(each, pb.VerifyRequest) and each.opening_sent for each in cls.seen)


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


class WithoutFlag(Watched):
    """An older server, which does not know the field in its description either."""

    async def GetModelInfo(self, request: Any, context: Any) -> Any:
        reply = await super().GetModelInfo(request, context)
        reply.model.ClearField("max_unread_tokens")
        return reply


@pytest.mark.parametrize(
    ("kind", "trips"), daily([(Watched, 1), (WithoutFlag, 2)], 0), ids=["in one flight", "an older server"]
)
async def test_round_trips_to_the_first_token(monkeypatch: pytest.MonkeyPatch, kind: type[Watched], trips: int) -> None:
    """At 200 ms each way. The best of three: a machine that is busy only adds."""
    serve(monkeypatch, kind)
    async with target_site() as site, DelayLink() as link:
        await link.set(LinkSettings(RTT * 1000))
        async with distributed(await link.listen(site.address), pipeline=NEVER) as (generator, _):
            took = min([await seconds_to_first_token(generator) for _ in range(3)])
            assert trips * RTT <= took < (trips + 0.8) * RTT
        await until(lambda: site.free == 4)


# --- servers of other versions ---


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


class raw_stub_of_site:
    """A site and its raw stub."""

    def __init__(self, **options: Any) -> None:
        self._site = target_site(**options)

    async def __aenter__(self) -> tuple[Any, Any]:
        self.site = await self._site.__aenter__()
        self._stub = raw_stub(self.site.address)
        return await self._stub.__aenter__(), self.site

    async def __aexit__(self, *error: Any) -> None:
        await self._stub.__aexit__(*error)
        await self._site.__aexit__(*error)


async def test_a_run_whose_session_never_opens_ends_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.services.verify_runs.OPENING_COMES", 0.05)
    async with raw_stub_of_site() as (target, site):
        tasks = len(asyncio.all_tasks())
        for name in ("guessed", "s" * 128):
            call = target.VerifyStream()
            await call.write(running(PROMPT, session_id=name, opening_sent=True))
            assert (await status(call))[0] == "NOT_FOUND"
        await until(lambda: len(asyncio.all_tasks()) <= tasks)
        assert (len(site.verifier.sessions), site.free) == (0, 4)


async def test_a_run_whose_opening_fails_after_its_slot_was_taken_does_not_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The opening holds the session when the run comes to it: without the opening's parameters no step is made."""
    async with raw_stub_of_site() as (target, site):

        async def processing(*arguments: Any) -> None:
            await until(lambda: next(iter(site.verifier.sessions)).in_use == 2)
            raise InvalidField("sampling", "it cannot be compiled")

        monkeypatch.setattr(site.engine, "processing", processing)
        call = target.VerifyStream()
        await call.write(running(PROMPT, opening_sent=True))
        await until(lambda: len(Watched.seen) == 1)
        refused = await refusal(target.OpenSession(opening("s")))
        assert (refused.code, refused.reason) == ("INVALID_ARGUMENT", "INVALID_FIELD")
        code, details = await status(call)
        assert code == "NOT_FOUND" and details == "no session s: its opening failed"
        await until(lambda: (len(site.verifier.sessions), site.free) == (0, 4))
        again = await refusal(target.Verify(pb.VerifyRequest(session_id="s", base_length=1)))
        assert again.code == "NOT_FOUND"


async def test_messages_that_come_before_the_opening_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.services.verify_runs.OPENING_COMES", 1.0)
    async with raw_stub_of_site() as (target, _):
        call = target.VerifyStream()

        async def flood() -> None:
            while True:
                await call.write(running(PROMPT, [1] * 5, stop_token_ids=[1] * 10_000, opening_sent=True))

        with pytest.raises((grpc.RpcError, asyncio.InvalidStateError)):  # writes wait until the call has ended
            await flood()
        assert len(Watched.seen) <= MAX_AHEAD + 3


# --- going elsewhere ---


# --- the table ---
