"""G7: a session that its client leaves is closed, though the call fails, its request is gone, or the verifier changed.

Leases are endless here: only a close frees anything.
"""

from __future__ import annotations

import asyncio
import gc
from functools import partial
from typing import Any

import grpc
import pytest

from tandem.rpc import wire
from tandem.rpc.received_errors import TandemError
from tandem.rpc.verifier_client import Deadlines, SessionCloses, VerifierClient
from tandem.speculation.types import Request
from tandem.v1 import target_verifier_pb2 as pb
from tests.services.test_limits import Wordy
from tests.support import (
    GREEDY,
    ids,
    in_front,
    opening,
    raw_stub,
    refusal,
    remote_verifier,
    run,
    target_site,
    toy,
    until,
)
from tests.toy import ToyConfig

FOR_EVER = 1e6
PROMPT = list(b"the prompt")


@pytest.mark.parametrize("silent", [False, True], ids=["refused", "unanswered"])
async def test_a_session_whose_close_fails_is_closed_by_a_later_one(silent: bool) -> None:
    calls = 0

    async def deaf(inner: Any, request: Any, context: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 1:
            return await inner.CloseSession(request, context)
        await asyncio.sleep(3600 * silent)
        await context.abort(grpc.StatusCode.UNAVAILABLE, "not now")

    async with target_site(lease_seconds=FOR_EVER) as site, in_front(site, CloseSession=deaf) as address:
        client = VerifierClient(address, "toy", Deadlines(close=0.1 if silent else 2.0))
        remote = remote_verifier(client, Request(GREEDY))
        await remote.open(PROMPT)
        await remote.close()
        assert site.free == 3, "the first attempt cannot have succeeded"
        await until(lambda: site.free == 4 and not client.closes)
        await client.close()


async def test_a_close_is_not_made_again_where_it_was_refused_and_not_for_ever() -> None:
    calls: list[str] = []

    async def call(code: str) -> None:
        calls.append(code)
        raise TandemError(code, "no")

    closes = SessionCloses(attempts=3, first=0.001)
    for code in ("PERMISSION_DENIED", "UNAVAILABLE"):
        await closes.begin(partial(call, code))
    await until(lambda: not closes)
    assert calls == ["PERMISSION_DENIED"] + ["UNAVAILABLE"] * 3


async def test_a_client_that_is_closed_closes_its_sessions_first_and_waits_for_no_dead_verifier() -> None:
    async with target_site(lease_seconds=FOR_EVER) as site:
        client = VerifierClient(site.address, "toy")
        remote = remote_verifier(client, Request(GREEDY))
        await remote.open(PROMPT)
        closing = asyncio.create_task(remote.close())
        await asyncio.sleep(0)
        closing.cancel()
        await client.close()
        assert site.free == 4
        endless = SessionCloses()
        endless.begin(asyncio.Event().wait)
        await endless.settle(0.01)
        assert not endless


async def test_an_opening_that_its_close_overtook_opens_nothing() -> None:
    async with target_site(lease_seconds=FOR_EVER) as site, raw_stub(site.address) as target:
        await target.CloseSession(pb.CloseSessionRequest(session_id="s"))
        refused = await refusal(target.OpenSession(opening()))
        assert site.free == 4
        long = pb.CloseSessionRequest(session_id="s" * 500)
        assert (await refusal(target.CloseSession(long))).code == "INVALID_ARGUMENT"
        assert len(site.verifier.sessions._ended) == 1, "an id that no session can have was remembered"
    assert (refused.code, refused.reason) == ("ALREADY_EXISTS", "SESSION_CONFLICT")
    assert "s was closed" in refused.message


async def test_an_opening_that_waits_for_a_slot_when_its_close_comes_opens_nothing() -> None:
    async with target_site(toy(slots=1), FOR_EVER, opening_seconds=30) as site, raw_stub(site.address) as target:
        await target.OpenSession(opening("first"))
        second = asyncio.ensure_future(refusal(target.OpenSession(opening("second"))))
        await until(lambda: site.engine.slots.waiting == 1)
        for name in ("second", "first"):
            await target.CloseSession(pb.CloseSessionRequest(session_id=name))
        assert (await second).code == "ALREADY_EXISTS"
        assert site.free == 1


def test_a_stream_that_is_dropped_without_being_closed_frees_its_slot_before_any_garbage_is_collected() -> None:
    async def test() -> None:
        runner = toy(ToyConfig(step_seconds=0.002), slots=1, max_length=2048)
        async with target_site(runner, FOR_EVER, tokenizer=Wordy()) as site:
            asked = wire.generation_to_wire(ids(b"abc", 2000, ignore_end_of_sequence=True))
            message = pb.TargetVerifierGenerateRequest(generation=asked)
            stream = site.method.stream(message)
            await anext(stream)
            assert site.free == 0
            del stream
            await until(lambda: site.free == 1 and site.lifecycle.running == 0)
            async with raw_stub(site.address) as target:
                stuck = target.Generate(message)
                await stuck.read()
                await until(lambda: site.engine.batcher.steps > 200)  # more than the transport takes
                stuck.cancel()
                await until(lambda: site.free == 1 and site.lifecycle.running == 0)

    gc.collect()
    gc.disable()
    try:
        run(test())
    finally:
        gc.enable()
