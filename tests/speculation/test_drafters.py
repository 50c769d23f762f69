"""The n-gram drafter: what followed the longest, latest occurrence of the last tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.speculation.drafters import NgramDrafter
from tandem.speculation.types import Draft, Proposer
from tests.speculation import laws


def propose(tokens: Sequence[int], k: int, longest: int = 5, shortest: int = 2) -> tuple[int, ...]:
    async def once() -> Draft:
        drafter = NgramDrafter(longest, shortest)
        await drafter.open(tokens)
        return await drafter.propose(tokens, k)

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
        return [(await drafter.propose(tokens[:cut], k)).token_ids for cut in sorted(cuts)]

    assert asyncio.run(grown()) == [propose(tokens[:cut], k, 4, 1) for cut in sorted(cuts)]


async def test_a_new_request_knows_nothing_of_the_last_one():
    drafter = NgramDrafter()
    await drafter.open([1, 2, 3, 1, 2])
    assert (await drafter.propose([1, 2, 3, 1, 2], 1)).token_ids == (3,)
    await drafter.close()
    await drafter.close()
    await drafter.open([7, 1, 2])
    assert (await drafter.propose([7, 1, 2], 1)).token_ids == ()


@pytest.mark.parametrize(("longest", "shortest"), [(5, 0), (1, 2), (0, 0), (3, -1)])
def test_sizes_that_make_no_sense_are_refused(longest, shortest):
    with pytest.raises(ValueError, match=f"not {shortest} and {longest}"):
        NgramDrafter(longest, shortest)


def test_every_draft_token_has_one_proposer():
    with pytest.raises(ValueError, match="proposed_by: 1 entries for 2 tokens"):
        Draft((1, 2), proposed_by=(Proposer.MODEL,))
