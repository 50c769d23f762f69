"""Sessions and requests whose KV slots share memory: admitted by what they may take, or told to come back (G6)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from tandem.engine.kv_memory import limit_kv_memory
from tandem.v1 import target_verifier_pb2 as pb
from tests.services.test_errors import refusal
from tests.services.test_identity import ByToken
from tests.services.test_target_verifier import opening, verifying
from tests.support import (
    Site,
    raw_stub,
    run,
    target_site,
    toy,
    until,
)

WHOLE = toy().kv_bytes(160)


def limit(site: Site, given: int) -> None:
    assert site.engine
    limit_kv_memory(site.engine.slots, site.engine.batcher, [site.engine.runner], given)


def test_sessions_are_admitted_by_what_they_may_take_and_refused_with_a_time_to_come_back() -> None:
    async def test() -> None:
        async with target_site(opening_seconds=0.01) as site, raw_stub(site.address) as target:
            limit(site, WHOLE)
            for name in ("a", "b"):
                await target.OpenSession(opening(name, max_total_tokens=60))
            assert (site.free, site.engine.slots.memory.reserved) == (2, 2 * toy().kv_bytes(60))
            refused = await refusal(target.OpenSession(opening("c", max_total_tokens=80)))
            assert (refused.code, refused.reason) == ("RESOURCE_EXHAUSTED", "NO_SLOT")
            assert refused.retry and "kv_cache_mb" in refused.message
            await target.CloseSession(pb.CloseSessionRequest(session_id="a"))
            await target.OpenSession(opening("c", max_total_tokens=80))
            await target.Verify(verifying([*opening().prefix], name="b"))
            for name in ("b", "c"):
                await target.CloseSession(pb.CloseSessionRequest(session_id=name))
            assert (site.free, site.engine.slots.memory.reserved) == (4, 0)

    run(test())


@pytest.mark.parametrize("names", ["one name", "new names"])
def test_an_opening_that_cannot_fit_holds_no_other_caller_back_and_has_its_turn_later(
    names: str, tmp_path: Path
) -> None:
    """Bob's long session has more than half of the memory; Alice, who holds nothing, asks for all, again and again."""
    callers = ByToken(tmp_path)

    async def test() -> None:
        async with (
            target_site(security=callers.security) as site,
            raw_stub(site.address, credentials=callers.credentials("alice")) as alice,
            raw_stub(site.address, credentials=callers.credentials("bob")) as bob,
        ):
            limit(site, WHOLE)
            site.verifier._opening_seconds = 0.02
            await bob.OpenSession(opening("long", max_total_tokens=80))
            refused = 0

            async def ask() -> None:
                nonlocal refused
                while True:
                    try:
                        name = "all" if names == "one name" else f"all {refused}"
                        await alice.OpenSession(opening(name, max_total_tokens=160))
                        return
                    except grpc.RpcError as error:
                        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                        refused += 1

            async def short(name: str) -> None:
                await bob.OpenSession(opening(name, max_total_tokens=60))
                await bob.Verify(verifying([*opening().prefix], name=name))
                await bob.CloseSession(pb.CloseSessionRequest(session_id=name))

            asking = asyncio.create_task(ask())
            await until(lambda: refused >= 3)
            for n in range(30):
                await short(f"short {n}")
            before = refused
            await until(lambda: refused > before)
            assert not asking.done()
            await bob.CloseSession(pb.CloseSessionRequest(session_id="long"))
            await asking
            assert site.engine.slots.memory.reserved == WHOLE

    run(test())
