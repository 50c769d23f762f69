"""Sessions of proposals that need no slot are bounded by count and by bytes, per caller and in all."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from tandem.rpc.channel import DRAFT
from tandem.services.draft_worker import BYTES_PER_TOKEN, ProposalSessions
from tandem.services.security.config import Security
from tandem.services.security.limits import LimitReached, ServerLimits
from tests.services.test_errors import refusal
from tests.services.test_proposals import Caller, asked_once, asking, further
from tests.support import Site, raw_stub, worker_site


def by_lookup(**limits: int) -> Any:
    return worker_site(None, None, security=Security(limits=ServerLimits(**limits)))


def held(site: Site) -> tuple[int, int]:
    """Sessions and bytes that the limits know of."""
    counted = site.worker.sessions
    return counted._together["max_proposal_sessions"], counted._together["max_proposal_bytes"]


async def test_lookup_takes_no_slot_and_so_many_sessions() -> None:
    async with by_lookup(max_proposal_sessions=3) as site, raw_stub(site.address, DRAFT) as worker:
        callers = [Caller(worker) for _ in range(3)]
        for caller in callers:
            await caller.ask(asking([1, 2, 3]))
        refused = await asked_once(worker, asking([1, 2, 3]))
        assert (refused.code, refused.reason, refused.retry) == ("RESOURCE_EXHAUSTED", "IDENTITY_LIMIT", 0.1)
        assert "max_proposal_sessions" in refused.message and "3 of 3" in refused.message
        await callers[0].ask(further([4]))  # who was let in goes on
        await callers[1].end()
        await Caller(worker).ask(asking([1, 2, 3]))
        assert len(site.worker.sessions) == 3


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
    counts = ProposalSessions(ServerLimits(max_proposal_sessions=4, max_proposal_bytes=8 * BYTES_PER_TOKEN))
    with contextlib.ExitStack() as alices, contextlib.ExitStack() as others:
        for _ in range(2):
            alices.enter_context(counts.one("alice"))
        counts.grow("alice", 4)
        with pytest.raises(LimitReached, match=r"max_proposal_sessions: your .* 2 of 2"):
            alices.enter_context(counts.one("alice"))
        with pytest.raises(LimitReached, match="max_proposal_bytes: your"):
            counts.grow("alice", 1)
        for _ in range(2):
            others.enter_context(counts.one("bob"))
        with pytest.raises(LimitReached, match=r"max_proposal_sessions: all .* 4 of 4"):
            others.enter_context(counts.one("carol"))
        alices.close()
        counts.grow("alice", -4)
        others.enter_context(counts.one("carol"))
        counts.grow("carol", 4)


@pytest.mark.parametrize("name", ["max_proposal_sessions", "max_proposal_bytes"])
def test_a_limit_below_one_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        ServerLimits(**{name: 0})
