"""When a copy is believed rather than the model, and how long it is where nothing else drafts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tandem.speculation.estimate import Estimate
from tandem.speculation.lookup_policy import AT_ONCE, LEAST, HybridDrafter, PolicedLookup
from tandem.speculation.types import Draft, Proposer


class Model:
    """A draft model that always says the same."""

    async def open(self, prompt: Sequence[int]) -> None: ...

    async def propose(self, tokens: Sequence[int], k: int, model_k: int | None = None) -> Draft:
        return Draft((900,) * k, compute_seconds=0.5, proposed_by=(Proposer.MODEL,) * k)

    async def draft_bonus(self, tokens: Sequence[int]) -> Draft:
        return await self.propose(tokens, 1)

    async def close(self) -> None: ...


def looked_up(text: Sequence[int], estimate: Estimate | None = None) -> PolicedLookup:
    """A lookup that is open for a request whose prompt is `text`."""
    lookup = PolicedLookup(estimate or Estimate())
    asyncio.run(lookup.open(text))
    return lookup


def with_match(size: int) -> list[int]:
    """A text whose last `size` tokens stood before 50, 51, ..."""
    return [*range(10, 20), *range(50, 60), *range(20 - size, 20)]


async def test_the_model_drafts_unless_a_match_is_long_enough_for_a_copy() -> None:
    async def drafted(size: int) -> tuple[int, ...]:
        drafter = HybridDrafter(PolicedLookup(Estimate()), Model())
        await drafter.open(with_match(size))
        return (await drafter.propose(with_match(size), 2)).token_ids

    assert [await drafted(size) for size in (LEAST - 1, LEAST)] == [(900, 900), (50, 51)]


async def test_others_of_the_event_loop_have_turns_while_a_long_prompt_is_indexed() -> None:
    lookup, turns = PolicedLookup(Estimate()), 0
    opening = asyncio.ensure_future(lookup.open(list(range(20 * AT_ONCE))))
    while not opening.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns >= 19


def timed(each: float, rows: int = 1) -> Estimate:
    """Of a process in whose steps of 10 ms a draft token takes a share `each` of them."""
    estimate = Estimate()
    lookup = PolicedLookup(estimate)
    for _ in range(50):
        for drafted in (0, 4):
            lookup.stepped(drafted, 0.010 * (1 + each * drafted), rows)
    return estimate


def test_alone_a_copy_is_as_long_as_it_gains_more_than_the_steps_that_verify_it_cost() -> None:
    def copied(size: int, each: float, rows: int = 1) -> int:
        return len(looked_up(with_match(size), timed(each, rows)).copy_alone(with_match(size), 4))

    assert copied(7, 0.01) == copied(7, 0.1) == 4
    assert copied(1, 0.3) == 0 < copied(1, 0.01), "right once in five times, for a third of a step"
    assert copied(3, 0.3) < copied(3, 0.05)
    assert [copied(3, 0.3, rows) > 0 for rows in (1, 8)] == [True, False], "seven others would wait for it"


def test_one_late_step_does_not_end_copies() -> None:
    text, estimate = list(range(50)) * 3, timed(0.02)
    lookup = looked_up(text, estimate)
    for _ in range(2):
        lookup.stepped(4, 1.0)
    assert len(lookup.copy_alone(text, 4)) == 4
