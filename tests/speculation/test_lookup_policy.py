"""When a copy is believed rather than the model, and what that is learned from."""

from __future__ import annotations

import asyncio
import itertools
import operator
import sys
import threading
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.speculation.acceptance_rates import AcceptanceCounts
from tandem.speculation.drafters import NgramDrafter, teach
from tandem.speculation.hybrid import HybridDrafter
from tandem.speculation.lookup_policy import (
    AT_ONCE,
    LONG,
    MODEL,
    REQUEST_EACH,
    REQUEST_TOGETHER,
    TRIED_AGAIN,
    LookupPolicy,
    PolicedLookup,
)
from tandem.speculation.rounds import DraftedRounds, VerifierHere
from tandem.speculation.step_times import REFRESH
from tandem.speculation.types import Draft, Proposer, SamplingParams, Verdict

GREEDY = SamplingParams()


class Model:
    """A draft model that always says the same, or what the text will say if it `knows` it; notes what it is asked."""

    def __init__(self, knows: Sequence[int] | None = None) -> None:
        self.knows = knows
        self.calls: list[object] = []

    async def open(self, prompt: Sequence[int]) -> None:
        self.calls.append("open")

    async def propose(self, tokens: Sequence[int], k: int, model_k: int | None = None) -> Draft:
        self.calls.append(list(tokens))
        said = tuple(self.knows[len(tokens) : len(tokens) + k]) if self.knows else (900,) * k
        return Draft(said, compute_seconds=0.5, proposed_by=(Proposer.MODEL,) * len(said))

    async def draft_bonus(self, tokens: Sequence[int]) -> Draft:
        return await self.propose(tokens, 1)

    async def close(self) -> None:
        self.calls.append("close")


class Known(VerifierHere):
    """A target that is known to say `text`."""

    def __init__(self, text: Sequence[int]) -> None:
        self.text = text

    async def open(self, prompt: Sequence[int]) -> None: ...

    async def verify(
        self, tokens: Sequence[int], draft: Sequence[int], distributions: Sequence[object] = ()
    ) -> Verdict:
        accepted = 0
        while accepted < len(draft) and draft[accepted] == self.text[len(tokens) + accepted]:
            accepted += 1
        end = len(tokens) + accepted + 1
        return Verdict(tuple(self.text[len(tokens) : end]), accepted)

    async def close(self) -> None: ...


def proposers(text: Sequence[int], prompt: int, trust: LookupPolicy, model: Model, k: int = 3) -> list[Proposer | None]:
    """Who drafted, round by round, over all of `text`."""

    async def run() -> list[Proposer | None]:
        rounds = DraftedRounds(Known([*text, *[0] * (k + 1)]), HybridDrafter(PolicedLookup(trust), model))
        tokens, found = list(text[:prompt]), []
        await rounds.open(tokens)
        while len(tokens) < len(text):
            draft, verdict = await rounds.round(tokens, k)
            found.append(draft.proposed_by[0] if draft.proposed_by else None)
            tokens += verdict.token_ids
            teach(rounds.drafter, tokens)
        await rounds.close()
        return found

    return asyncio.run(run())


def followed_by_chance(length: int) -> list[int]:
    """Every second token is 1, and what follows it is new each time: short matches that are never right."""
    return [1 if i % 2 == 0 else 100 + i for i in range(length)]


def test_a_long_match_is_copied_and_the_model_left_alone() -> None:
    model = Model()
    text = [*range(10, 20), *range(10, 20)]
    assert Proposer.NGRAM in proposers(text, 15, LookupPolicy(), model)
    assert model.calls == ["open", "close"]


def test_a_short_match_gives_way_to_the_model_at_first() -> None:
    async def run() -> Draft:
        drafter = HybridDrafter(PolicedLookup(LookupPolicy()), Model())
        await drafter.open([1, 2, 3, 9, 1, 2, 3])
        return await drafter.propose([1, 2, 3, 9, 1, 2, 3], 2)

    assert asyncio.run(run()).token_ids == (900, 900)


def test_short_matches_that_are_right_come_to_be_believed_before_a_model_that_is_wrong() -> None:
    """A line of a table: a mark that is always followed by the same two tokens, between tokens never seen before."""
    text = [token for i in range(40) for token in (500 + i, 7, 8, 9)]
    trust = LookupPolicy()
    first = proposers(text, 8, trust, Model())
    assert first[0] is Proposer.MODEL
    assert first[-6:].count(Proposer.NGRAM) >= 3
    assert trust.rates(1, 2)[0] > LookupPolicy().rates(1, 2)[0], "the process does not remember"
    assert trust.rates(MODEL, 2)[0] < LookupPolicy().rates(MODEL, 2)[0]


def test_short_matches_that_are_wrong_are_left_to_a_model_that_is_right() -> None:
    text = followed_by_chance(120)
    found = proposers(text, 10, LookupPolicy(), Model(knows=[*text, *[0] * 8]))
    assert found[0] is Proposer.MODEL
    assert Proposer.NGRAM not in found[-10:]


def test_a_good_model_is_asked_where_long_matches_go_on_differently() -> None:
    """Sentences of five tokens that recur, each time followed by something else."""
    text = [token for i in range(30) for token in (1, 2, 3, 4, 5, 6, 600 + i, 700 + i)]
    model = Model(knows=[*text, *[0] * 8])
    found = proposers(text, 24, LookupPolicy(), model)
    assert found[-5:].count(Proposer.MODEL) >= 3


def test_copies_are_judged_where_the_model_was_asked() -> None:
    """Nothing is copied in this request, and yet the next one knows that copies are right."""
    trust = LookupPolicy()
    before = trust.rates(2, 2)
    lookup = PolicedLookup(trust)

    async def run() -> None:
        await lookup.open([1, 2, 3])
        lookup.learn([1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4])

    asyncio.run(run())
    assert trust.rates(LONG, 2)[0] > 0.84
    assert trust.rates(2, 2)[0] > before[0]


def test_the_model_is_judged_by_what_it_drafted_even_if_that_is_known_later() -> None:
    trust = LookupPolicy()
    lookup = PolicedLookup(trust)
    before = trust.rates(MODEL, 3)

    async def run() -> None:
        await lookup.open([1])
        lookup.modelled([1], [2, 3, 4])
        lookup.learn([1, 2, 3])
        assert trust.rates(MODEL, 3) == before, "judged before it is known whether the third is right"
        lookup.learn([1, 2, 3, 4])

    asyncio.run(run())
    assert all(now > then for now, then in zip(trust.rates(MODEL, 3), before, strict=True))


def test_a_draft_behind_a_guess_that_was_wrong_says_nothing_about_the_model() -> None:
    trust = LookupPolicy()
    lookup = PolicedLookup(trust)
    before = trust.rates(MODEL, 2)

    async def run() -> None:
        await lookup.open([1])
        lookup.modelled([1, 50], [51, 52])  # 50 was guessed, and 2 was committed
        lookup.learn([1, 2, 51, 52, 53])

    asyncio.run(run())
    assert trust.rates(MODEL, 2) == before


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=2, max_size=40), st.integers(1, 5), st.integers(1, 10))
def test_whatever_it_proposes_is_the_plain_lookups_copy(tokens: list[int], k: int, learned: int) -> None:
    async def run() -> None:
        lookup, plain = PolicedLookup(LookupPolicy()), NgramDrafter(8)
        await lookup.open(tokens[:1])
        lookup.learn(tokens[:learned])
        found, copy = lookup.copy(tokens, k), await plain.propose(tokens, k)
        assert found.token_ids in ((), copy.token_ids)

    asyncio.run(run())


def test_others_of_the_event_loop_have_turns_while_a_long_prompt_is_indexed() -> None:
    async def test() -> int:
        lookup, turns = PolicedLookup(LookupPolicy()), 0
        opening = asyncio.ensure_future(lookup.open(list(range(20 * AT_ONCE))))
        while not opening.done():
            await asyncio.sleep(0)
            turns += 1
        return turns

    assert asyncio.run(test()) >= 19


def copied_after(match: int, each: float, by_time: bool = True, steps: int = 20) -> int:
    """The length of a copy after a match of so many tokens; a draft token lengthens a step by this share of it."""
    policy = LookupPolicy()
    for _ in range(200):
        policy.counts[MODEL].note(4, 0)
    for _ in range(steps):
        for drafted in (0, 4):
            policy.stepped(drafted, 0.010 * (1 + each * drafted))
    lookup = PolicedLookup(policy)
    lookup.by_time = by_time
    text = [*range(10, 20), *range(50, 60), *range(20 - match, 20)]
    asyncio.run(lookup.open(text))
    return len(lookup.copy(text, 4).token_ids)


def test_a_copy_is_as_long_as_it_gains_more_than_the_steps_that_verify_it_cost() -> None:
    assert copied_after(7, each=0.01) == copied_after(7, each=0.1) == 4
    assert copied_after(1, each=0.3) == 0, "right once in five times, for a third of a step"
    assert copied_after(1, each=0.01) > 0
    assert 0 < copied_after(7, each=0.5) <= 4
    assert copied_after(3, each=0.3) < copied_after(3, each=0.05)


def test_where_no_step_was_timed_or_tokens_depend_on_lengths_a_copy_is_as_long_as_asked() -> None:
    assert copied_after(1, each=0.3, steps=0) == copied_after(1, each=0.3, by_time=False) == 4


def test_while_another_thread_copies_what_is_learned_is_that_of_the_text() -> None:
    text = [at * at % 7 for at in range(3000)]
    ours, theirs = LookupPolicy(), LookupPolicy()
    shared, alone = PolicedLookup(ours), PolicedLookup(theirs)
    ended = threading.Event()

    def copies() -> None:
        try:
            for end in range(20, len(text)):
                shared.copy_alone(text[:end], 5)
        finally:
            ended.set()

    asyncio.run(shared.open(text[:10]))
    asyncio.run(alone.open(text[:10]))
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        thread = threading.Thread(target=copies)
        thread.start()
        learned = 10
        while not ended.is_set():
            learned = min(learned + 1, len(text))
            shared.learn(text[:learned])
        thread.join()
    finally:
        sys.setswitchinterval(interval)
    for end in range(11, len(text) + 1):
        alone.learn(text[:end])
    shared.learn(text)
    assert [ours.rates(source, 3) for source in range(1, LONG + 1)] == [
        theirs.rates(source, 3) for source in range(1, LONG + 1)
    ]


def test_a_copy_that_pays_alone_is_left_out_where_others_of_its_step_wait_for_it() -> None:
    """After 3 tokens that occurred before, 0.55 tokens of a copy are right; it makes a step longer by so much."""

    def copied(rows: int, longer: float) -> bool:
        policy = LookupPolicy()
        for _ in range(50):
            for drafted in (0, 1):
                policy.stepped(drafted, 0.010 * (1 + longer * drafted), rows)
        lookup = PolicedLookup(policy)
        text = [*range(10, 20), *range(50, 60), *range(17, 20)]
        asyncio.run(lookup.open(text))
        return bool(lookup.copy_alone(text, 1))

    assert [copied(rows, 0.3) for rows in (1, 2, 8)] == [True, False, False]
    assert [copied(rows, 0.03) for rows in (1, 2, 8)] == [True, True, True]


def test_one_late_step_does_not_end_copies_for_good() -> None:
    policy = LookupPolicy()
    lookup = PolicedLookup(policy)
    text = list(range(50)) * 3
    asyncio.run(lookup.open(text))
    copies = list[int]()
    for _ in range(6 * REFRESH - 1):
        policy.stepped(0, 0.010)
    for at in range(200):
        copies.append(len(lookup.copy_alone(text, 4)))
        policy.stepped(copies[-1], 0.010 + 0.0002 * copies[-1] + (0.300 if at == 0 else 0.0))
    assert copies[: TRIED_AGAIN + 2] == [4] + [0] * TRIED_AGAIN + [4]
    assert copies[-100:] == [4] * 100


def test_of_a_text_that_only_grows_the_same_is_copied() -> None:
    text = [at * at % 7 for at in range(300)]
    grows, compares = NgramDrafter(8, only_grows=True), NgramDrafter(8)
    for end in (5, 9, 9, 40, *range(41, 300)):
        assert grows.match(text[:end], 5) == compares.match(text[:end], 5)
        assert grows.has(text[: end - 1]) and not grows.has([*text[:end], 0])


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=30), st.integers(1, 32), st.floats(0, 0.5))
def test_a_copy_has_the_length_that_commits_most_per_second_of_all(
    seen: list[tuple[int, int]], most: int, longer: float
) -> None:
    policy, text = LookupPolicy(), list(range(50)) * 3
    for drafted, right in seen:
        policy.counts[LONG].note(drafted, right)
    for drafted in (0, 8, 16) * 8:
        policy.stepped(drafted, 0.010 * (1 + longer * drafted))
    lookup = PolicedLookup(policy)
    asyncio.run(lookup.open(text))
    rates = AcceptanceCounts(1.0).rates(policy.rates(LONG, most), REQUEST_TOGETHER, REQUEST_EACH)[0]
    tokens = [1 + accepted for accepted in itertools.accumulate(itertools.accumulate(rates, operator.mul), initial=0.0)]
    best = max(range(most + 1), key=lambda n: (tokens[n] / policy.times[n], -n))
    assert len(lookup.copy_alone(text, most)) == best
