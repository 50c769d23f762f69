"""Prompt lookup: what it proposes, when a copy is believed rather than the model, and how long it is."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.speculation.drafters import NgramDrafter
from tandem.speculation.estimate import Estimate
from tandem.speculation.lookup_policy import AT_ONCE, LEAST, HybridDrafter, PolicedLookup
from tandem.speculation.types import Draft, LengthPlan, Proposer
from tests.speculation import laws


def propose(tokens: Sequence[int], k: int, longest: int = 5, shortest: int = 2) -> tuple[int, ...]:
    async def once() -> Draft:
        drafter = NgramDrafter(longest, shortest)
        await drafter.open(tokens)
        return await drafter.propose(tokens, LengthPlan(k, k))

    return asyncio.run(once()).token_ids


def naive(tokens: Sequence[int], k: int, longest: int, shortest: int) -> tuple[int, ...]:
    """Tries every size from the longest and every place from the latest, then extends the tokens one by one."""
    grown = list(tokens)
    for n in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for start in range(len(tokens) - n - 1, -1, -1):
            if list(tokens[start : start + n]) == list(tokens[len(tokens) - n :]):
                for i in range(k):
                    grown.append(grown[start + n + i])
                return tuple(grown[len(tokens) :])
    return ()


@laws.repeatable
@given(
    tokens=st.lists(st.integers(0, 2), max_size=40),
    k=st.integers(0, 9),
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 5)).map(sorted),
)
def test_it_proposes_what_a_naive_search_finds_after_the_same_tokens(tokens, k, sizes):
    shortest, longest = sizes
    assert propose(tokens, k, longest, shortest) == naive(tokens, k, longest, shortest)


@settings(laws.repeatable, max_examples=60)
@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    cuts=st.lists(st.integers(1, 40), max_size=8),
    k=st.integers(1, 5),
)
def test_an_index_grown_round_by_round_equals_a_fresh_one(tokens, cuts, k):
    async def grown() -> list[tuple[int, ...]]:
        drafter = NgramDrafter(4, 1)
        await drafter.open(tokens[:1])
        return [(await drafter.propose(tokens[:cut], LengthPlan(k, k))).token_ids for cut in sorted(cuts)]

    assert asyncio.run(grown()) == [propose(tokens[:cut], k, 4, 1) for cut in sorted(cuts)]


async def test_a_new_request_knows_nothing_of_the_last_one():
    drafter = NgramDrafter()
    await drafter.open([1, 2, 3, 1, 2])
    assert (await drafter.propose([1, 2, 3, 1, 2], LengthPlan(1, 1))).token_ids == (3,)
    await drafter.close()
    await drafter.close()
    await drafter.open([7, 1, 2])
    assert (await drafter.propose([7, 1, 2], LengthPlan(1, 1))).token_ids == ()


@pytest.mark.parametrize(("longest", "shortest"), [(5, 0), (1, 2), (0, 0), (3, -1)])
def test_sizes_that_make_no_sense_are_refused(longest, shortest):
    with pytest.raises(ValueError, match=f"not {shortest} and {longest}"):
        NgramDrafter(longest, shortest)


def test_every_draft_token_has_one_proposer():
    with pytest.raises(ValueError, match="proposed_by: 1 entries for 2 tokens"):
        Draft((1, 2), proposed_by=(Proposer.MODEL,))


class Model:
    """A draft model that always says the same."""

    async def open(self, prompt: Sequence[int]) -> None: ...

    async def propose(self, tokens: Sequence[int], plan: LengthPlan) -> Draft:
        return Draft((900,) * plan.model_k, compute_seconds=0.5, proposed_by=(Proposer.MODEL,) * plan.model_k)

    async def draft_bonus(self, tokens: Sequence[int]) -> Draft:
        return await self.propose(tokens, LengthPlan(1, 1))

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
        return (await drafter.propose(with_match(size), LengthPlan(2, 2))).token_ids

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
