"""G6: an OpenSession has its turn among requests that wait for a slot, within a bound. Counted, not timed."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from tandem.engine.slots import limit_kv_memory
from tandem.services.security.access import Security
from tandem.services.security.limits import ServerLimits
from tandem.v1 import target_verifier_pb2 as pb
from tests.support import answer, ids, opening, raw_stub, refusal, target_site, toy, until
from tests.toy import ToyConfig


@pytest.mark.parametrize("wait", [30.0, 0.02], ids=["one long wait", "many short ones"])
async def test_openings_are_not_starved_by_callers_that_generate_without_a_pause(wait: float) -> None:
    """One slot, two that loop Generate, and one that loops OpenSession: each has its turn."""
    runner = toy(ToyConfig(step_seconds=0.002), slots=1)
    async with (
        target_site(runner, 1e6, opening_seconds=wait) as site,
        raw_stub(site.address) as target,
        site.client() as client,
    ):
        generated = 0

        async def generate() -> None:
            nonlocal generated
            while True:
                await answer(client.generate, ids(b"abc", 6, ignore_end_of_sequence=True))
                generated += 1

        loops = [asyncio.create_task(generate()) for _ in range(2)]
        await until(lambda: generated >= 2)
        before = generated
        for n in range(10):
            await opened(target, f"s{n}")
            await target.CloseSession(pb.CloseSessionRequest(session_id=f"s{n}"))
        assert generated - before <= 60, "an opening should wait for a few requests, not for dozens"
        for loop in loops:
            loop.cancel()
        await asyncio.gather(*loops, return_exceptions=True)
        await until(lambda: site.free == 1)


async def opened(target: Any, name: str) -> None:
    """Opens a session as our client does: where the server is full it comes back."""
    for _ in range(100):
        try:
            await target.OpenSession(opening(name))
            return
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    raise AssertionError("it was never opened")


async def test_a_full_server_refuses_an_opening_after_its_wait_and_says_when_to_come_back() -> None:
    async with target_site(toy(slots=1), opening_seconds=0.01) as site, raw_stub(site.address) as target:
        await target.OpenSession(opening("first"))
        refused = await refusal(target.OpenSession(opening("second")))
        assert (refused.code, refused.reason, refused.retry_seconds) == ("RESOURCE_EXHAUSTED", "NO_SLOT", 0.1)
        assert site.engine.slots.waiting == 0


async def test_openings_that_wait_count_as_their_callers_sessions() -> None:
    security = Security(limits=ServerLimits(max_sessions_per_identity=2))
    async with (
        target_site(toy(slots=1), security=security, opening_seconds=30) as site,
        raw_stub(site.address) as target,
    ):
        await target.OpenSession(opening("first"))
        waiting = asyncio.ensure_future(target.OpenSession(opening("second")))
        await until(lambda: site.engine.slots.waiting == 1)
        refused = await refusal(target.OpenSession(opening("third")))
        assert (refused.code, refused.reason) == ("RESOURCE_EXHAUSTED", "IDENTITY_LIMIT")
        await target.CloseSession(pb.CloseSessionRequest(session_id="first"))
        await waiting


async def test_the_same_opening_twice_while_it_waits_is_one_session() -> None:
    """G4."""
    async with target_site(toy(slots=2), opening_seconds=30) as site, raw_stub(site.address) as target:
        for name in ("a", "b"):
            await target.OpenSession(opening(name))
        twice = [asyncio.ensure_future(target.OpenSession(opening("c"))) for _ in range(2)]
        await until(lambda: site.engine.slots.waiting == 2)
        for name in ("a", "b"):
            await target.CloseSession(pb.CloseSessionRequest(session_id=name))
        await asyncio.gather(*twice)
        assert (len(site.verifier.sessions), site.free) == (1, 1)


async def test_a_server_that_began_to_drain_meanwhile_opens_nothing() -> None:
    async with target_site(toy(slots=1), opening_seconds=30) as site, raw_stub(site.address) as target:
        await target.OpenSession(opening("first"))
        waiting = asyncio.ensure_future(refusal(target.OpenSession(opening("second"))))
        await until(lambda: site.engine.slots.waiting == 1)
        site.lifecycle.accepting = False
        await target.CloseSession(pb.CloseSessionRequest(session_id="first"))
        assert (await waiting).code == "UNAVAILABLE"
        assert site.free == 1


async def test_sessions_that_share_memory_are_admitted_by_what_they_may_take() -> None:
    async with target_site(opening_seconds=0.01) as site, raw_stub(site.address) as target:
        limit_kv_memory(site.engine.slots, site.engine.batcher, [site.engine.runner], toy().kv_bytes(160))
        for name in ("a", "b"):
            await target.OpenSession(opening(name, max_total_tokens=60))
        assert (site.free, site.engine.slots.memory.reserved) == (2, 2 * toy().kv_bytes(60))
        refused = await refusal(target.OpenSession(opening("c", max_total_tokens=80)))
        assert (refused.code, refused.reason) == ("RESOURCE_EXHAUSTED", "NO_SLOT")
        assert refused.retry_seconds and "kv_cache_mb" in refused.message
        await target.CloseSession(pb.CloseSessionRequest(session_id="a"))
        await target.OpenSession(opening("c", max_total_tokens=80))
        for name in ("b", "c"):
            await target.CloseSession(pb.CloseSessionRequest(session_id=name))
        assert (site.free, site.engine.slots.memory.reserved) == (4, 0)
