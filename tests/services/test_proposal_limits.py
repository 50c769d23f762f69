"""Sessions of proposals that need no slot are bounded by bytes, per caller and in all."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.rpc.channel import DRAFT
from tandem.services.draft_worker import BYTES_PER_TOKEN, ProposalSessions
from tandem.services.security.access import Security
from tandem.services.security.limits import LimitReached, ServerLimits
from tests.services.test_proposals import Caller, asked_once, asking, further
from tests.support import Site, raw_stub, refusal, worker_site


def by_lookup(**limits: int) -> Any:
    return worker_site(None, None, security=Security(limits=ServerLimits(**limits)))


def held(site: Site) -> tuple[int, int]:
    """Sessions and bytes that the limits know of."""
    return len(site.worker.sessions), site.worker.sessions._bytes.total()


async def test_lookup_holds_so_many_bytes_and_a_stream_that_would_grow_beyond_them_is_refused() -> None:
    most = 20 * BYTES_PER_TOKEN
    async with by_lookup(max_proposal_bytes=most) as site, raw_stub(site.address, DRAFT) as worker:
        first, second = Caller(worker), Caller(worker)
        for caller in (first, second):
            await caller.ask(asking([1] * 8))
        refused = await asked_once(worker, asking([1] * 5))
        assert refused.code == "RESOURCE_EXHAUSTED" and "max_proposal_bytes" in refused.message
        assert held(site) == (2, 16 * BYTES_PER_TOKEN)
        await first.ask(further([1] * 4))
        await second.call.write(further([1]))
        assert "max_proposal_bytes" in (await refusal(second.call.read())).message
        assert held(site) == (1, 12 * BYTES_PER_TOKEN)
        await first.end()
        assert held(site) == (0, 0)
        assert (await asked_once(worker, asking([]))).code == "INVALID_ARGUMENT"
        assert held(site) == (0, 0)


def test_a_caller_with_a_name_has_half_and_leaves_the_rest_to_others() -> None:
    counts = ProposalSessions(8 * BYTES_PER_TOKEN)
    counts.grow("alice", 4)
    with pytest.raises(LimitReached, match=r"max_proposal_bytes: your .* 4096 of 4096"):
        counts.grow("alice", 1)
    counts.grow("bob", 4)
    with pytest.raises(LimitReached, match=r"max_proposal_bytes: all .* 8192 of 8192"):
        counts.grow("carol", 1)
    counts.grow("alice", -4)
    counts.grow("carol", 4)
