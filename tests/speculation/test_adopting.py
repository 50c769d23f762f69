"""Drafts that are made elsewhere, and what the target committed while they travelled."""

from __future__ import annotations

import asyncio

from tandem.speculation.ahead import DraftingAhead
from tandem.speculation.drafters import NgramDrafter
from tandem.speculation.estimate import Estimate
from tandem.speculation.run_on import RunMessage
from tandem.speculation.types import Proposer, SpeculationStats
from tandem.speculation.verification_mode import DraftPlan, LookaheadPolicy


class Noting(LookaheadPolicy):
    """Notes whether each token was the one drafted."""

    def __init__(self) -> None:
        super().__init__(4, Estimate(), given=DraftPlan(8, 4, 4))
        self.hits: list[bool] = []

    def observe(self, hit: bool) -> None:
        self.hits.append(hit)


def adopting(known: list[int]) -> tuple[DraftingAhead, Noting, list[RunMessage]]:
    sent: list[RunMessage] = []
    lookahead = Noting()
    ahead = DraftingAhead(NgramDrafter(), lookahead, sent.append, SpeculationStats(), known, 100, 5, drafts_here=False)
    ahead.begin()
    return ahead, lookahead, sent


async def told(ahead: DraftingAhead, sent: list[RunMessage]) -> tuple[int, tuple[int, ...]] | None:
    """The draft that the verifier is told now."""
    sent.clear()
    task = asyncio.create_task(ahead.run())
    for _ in range(5):
        await asyncio.sleep(0)
    task.cancel()
    return (sent[-1].base_length, sent[-1].token_ids) if sent else None


async def test_a_late_draft_is_compared_once_and_what_it_reaches_beyond_is_used() -> None:
    ahead, lookahead, sent = adopting([1, 2, 3])
    ahead.arrived([4, 5])
    ahead.adopt(3, [4, 5, 6, 7], [Proposer.NGRAM] * 4)
    assert (lookahead.hits, await told(ahead, sent)) == ([True, True], (5, (6, 7)))
    ahead.adopt(3, [4, 5, 6, 7])
    ahead.adopt(4, [5, 6])
    assert (lookahead.hits, await told(ahead, sent)) == ([True, True], None)  # nothing is new
    ahead.adopt(5, [6, 7, 8])
    assert await told(ahead, sent) == (5, (6, 7, 8))
    assert ahead.proposers(4) == (Proposer.NGRAM,) * 4
    ahead.arrived([6])
    assert lookahead.hits == [True, True, True]


async def test_a_draft_that_the_target_contradicted_meanwhile_is_dropped() -> None:
    ahead, lookahead, sent = adopting([1, 2, 3])
    ahead.arrived([4, 5])
    ahead.adopt(3, [4, 9, 6, 7])
    assert (lookahead.hits, await told(ahead, sent)) == ([True, False], None)
    ahead.adopt(5, [6])
    ahead.arrived([7])
    assert lookahead.hits == [True, False, False]
    ahead.adopt(5, [6, 8, 8])
    assert (lookahead.hits, await told(ahead, sent)) == ([True, False, False], None)
