"""Sessions of proposals that need no slot are bounded by count and by bytes, per caller and in all."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.rpc.channel import DRAFT
from tandem.services.security.config import Security
from tandem.services.security.limits import LimitReached, ServerLimits
from tandem.services.sessions.proposal_limits import BYTES_PER_TOKEN, ProposalCounts
from tandem.v1 import draft_worker_pb2 as pb
from tests.services.test_errors import refusal
from tests.services.test_proposals import asking, ending
from tests.support import Site, raw_stub, run, worker_site


def by_lookup(**limits: int) -> Any:
    return worker_site(None, None, security=Security(limits=ServerLimits(**limits)))


def held(site: Site) -> tuple[int, int]:
    """Sessions and bytes that the limits know of."""
    proposed = site.proposals._proposed
    return proposed._together["max_proposal_sessions"], proposed._together["max_proposal_bytes"]


def test_lookup_takes_no_slot_and_so_many_sessions() -> None:
    async def test() -> None:
        async with by_lookup(max_proposal_sessions=3) as site, raw_stub(site.address, DRAFT) as worker:
            for n in range(3):
                await worker.Propose(asking([1, 2, 3], name=f"s{n}"))
            refused = await refusal(worker.Propose(asking([1, 2, 3], name="one more")))
            assert (refused.code, refused.reason, refused.retry) == ("RESOURCE_EXHAUSTED", "IDENTITY_LIMIT", 0.1)
            assert "max_proposal_sessions" in refused.message and "3 of 3" in refused.message
            await worker.Propose(asking([1, 2, 3, 4], 3, name="s0"))  # who was let in goes on
            await worker.EndProposals(ending("s1"))
            await worker.Propose(asking([1, 2, 3], name="one more indeed"))
            assert len(site.proposals.sessions) == 3

    run(test())


def test_lookup_holds_so_many_bytes_and_a_session_that_would_grow_beyond_them_is_refused_as_it_is() -> None:
    async def test() -> None:
        most = 20 * BYTES_PER_TOKEN
        async with by_lookup(max_proposal_bytes=most) as site, raw_stub(site.address, DRAFT) as worker:
            await worker.Propose(asking([1] * 8, name="a"))
            await worker.Propose(asking([1] * 8, name="b"))
            for call in (asking([1] * 13, 8, name="a"), asking([1] * 5, name="c")):
                refused = await refusal(worker.Propose(call))
                assert refused.code == "RESOURCE_EXHAUSTED" and "max_proposal_bytes" in refused.message
                assert held(site) == (2, 16 * BYTES_PER_TOKEN)
            await worker.Propose(asking([1] * 12, 8, name="a"))
            await worker.Propose(asking([1] * 2, 2, name="a"))  # and back
            assert held(site) == (2, 10 * BYTES_PER_TOKEN)
            for name in "ab":
                await worker.EndProposals(pb.EndProposalsRequest(session_id=name))
            assert held(site) == (0, 0)

    run(test())


def test_what_a_lease_or_a_failed_first_call_gives_back_is_counted_once() -> None:
    async def test() -> None:
        async with by_lookup() as site, raw_stub(site.address, DRAFT) as worker:
            assert (await refusal(worker.Propose(asking([])))).code == "INVALID_ARGUMENT"
            assert held(site) == (0, 0)
            await worker.Propose(asking([1] * 8))
            for session in site.proposals.sessions:
                session.expires = float("-inf")
            assert (await worker.Propose(asking([1] * 9, 8, name="other"))).unknown
            await worker.Propose(asking([1] * 4, name="other"))
            assert held(site) == (1, 4 * BYTES_PER_TOKEN)

    run(test())


def test_a_caller_with_a_name_has_half_and_leaves_the_rest_to_others() -> None:
    proposed = ProposalCounts(ServerLimits(max_proposal_sessions=4, max_proposal_bytes=8 * BYTES_PER_TOKEN))
    for _ in range(2):
        proposed.open("alice")
    proposed.grow("alice", 4)
    with pytest.raises(LimitReached, match=r"max_proposal_sessions: your .* 2 of 2"):
        proposed.open("alice")
    with pytest.raises(LimitReached, match="max_proposal_bytes: your"):
        proposed.grow("alice", 1)
    proposed.open("bob")
    proposed.open("bob")
    with pytest.raises(LimitReached, match=r"max_proposal_sessions: all .* 4 of 4"):
        proposed.open("carol")
    proposed.close("alice", 4)
    proposed.open("carol")
    proposed.grow("carol", 4)


@pytest.mark.parametrize("name", ["max_proposal_sessions", "max_proposal_bytes"])
def test_a_limit_below_one_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        ServerLimits(**{name: 0})
