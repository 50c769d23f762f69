"""Sessions and requests whose KV slots share memory: admitted by what they may take, or told to come back (G6)."""

from __future__ import annotations

from tandem.engine.slots import limit_kv_memory
from tandem.v1 import target_verifier_pb2 as pb
from tests.services.test_errors import refusal
from tests.services.test_target_verifier import opening, verifying
from tests.support import (
    Site,
    raw_stub,
    target_site,
    toy,
)

WHOLE = toy().kv_bytes(160)


def limit(site: Site, given: int) -> None:
    assert site.engine
    limit_kv_memory(site.engine.slots, site.engine.batcher, [site.engine.runner], given)


async def test_sessions_are_admitted_by_what_they_may_take_and_refused_with_a_time_to_come_back() -> None:
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
