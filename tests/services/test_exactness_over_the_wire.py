"""G1: every architecture says, token for token, what the target alone says with that seed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tandem.speculation.types import FinishReason
from tests.architectures import ARCHITECTURES, NEVER_WAITING, serving
from tests.daily import daily
from tests.support import (
    GREEDY,
    SAMPLED,
    answer,
    ids,
    oracle,
    run,
)

DRAFTS = {"perfect": "salt=0", "noisy": "miss=0.3", "always wrong": "salt=9", "n-gram": None}
PROMPT = b"abcabcabc"


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("draft", "lengths"),
    [
        *((draft, (0, 2, 5)) for draft in ("perfect", "noisy")),
        *(pytest.param(draft, (1, 3, 4), marks=pytest.mark.thorough) for draft in ("perfect", "noisy")),
        *((draft, (0, 1, 5)) for draft in ("always wrong", "n-gram")),
        *(pytest.param(draft, (2, 3, 4), marks=pytest.mark.thorough) for draft in ("always wrong", "n-gram")),
    ],
)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_speculation_length_and_sampling_gives_the_oracles_tokens(
    architecture: str, draft: str, lengths: Sequence[int]
) -> None:
    async def test() -> None:
        async with serving(architecture, DRAFTS[draft]) as served:
            for sampling in (GREEDY, SAMPLED, replace(SAMPLED, temperature=1.5, top_k=0, top_p=1.0, min_p=0.0)):
                expected = oracle(PROMPT, sampling, 24)
                for k in lengths:
                    got = await answer(served.generate, ids(PROMPT, 24, sampling=sampling, speculation_length=k))
                    assert got.token_ids == expected, f"k={k}"
                    stats = got.completion.stats
                    assert stats.rounds + stats.accepted >= len(expected)
                    if architecture in NEVER_WAITING:  # what its steps verify depends on when drafts come
                        continue
                    if (architecture, draft) == ("fused", "n-gram"):  # and here on what steps take
                        continue
                    speculates = architecture != "autoregressive" and k > 0
                    assert (stats.drafted > 0) == speculates
                    if speculates and draft == "perfect":
                        assert stats.accepted == stats.drafted
                        assert stats.rounds == -(-24 // (k + 1))
                    if speculates and draft == "noisy" and k > 1:
                        assert 0 < stats.accepted < stats.drafted

    run(test())


@pytest.mark.each_value
@pytest.mark.parametrize("draft", ["noisy", "n-gram"])
@pytest.mark.parametrize("architecture", daily(ARCHITECTURES, 1, 2, 4, 6))
def test_eight_concurrent_requests_of_different_lengths_on_three_slots_do_not_disturb_each_other(
    architecture: str, draft: str
) -> None:
    requests = [
        ids(
            bytes(range(40 + i, 43 + 6 * i)),
            5 + 4 * i,
            sampling=replace(SAMPLED, seed=i) if i % 2 else GREEDY,
            speculation_length=i % 6,
        )
        for i in range(8)
    ]

    async def test() -> None:
        async with serving(architecture, DRAFTS[draft], slots=3) as served:
            answers = await asyncio.gather(*(answer(served.generate, request) for request in requests))
        for request, got in zip(requests, answers, strict=True):
            assert got.token_ids == oracle(request.token_ids, request.sampling, request.max_new_tokens)

    run(test())


def test_a_seed_repeats_and_another_seed_says_something_else() -> None:
    async def test() -> None:
        async with serving("draft_worker", "miss=0.3") as served:
            outputs = [
                (await answer(served.generate, ids(PROMPT, 24, sampling=replace(SAMPLED, seed=seed)))).token_ids
                for seed in (1, 1, 2, 2**64 - 1)
            ]
        assert outputs[0] == outputs[1]
        assert len(set(outputs)) == 3

    run(test())


@pytest.mark.parametrize("architecture", daily(ARCHITECTURES, 0, 1, 2, 6, 7))
def test_a_sequence_may_be_filled_to_its_last_position(architecture: str) -> None:
    async def test() -> None:
        async with serving(architecture, "miss=0.3") as served:
            got = await answer(served.generate, ids(PROMPT, None, ignore_end_of_sequence=True))
        assert len(got.token_ids) == 160 - len(PROMPT)
        assert got.token_ids == oracle(PROMPT, GREEDY, len(got.token_ids), past_the_end=True)
        assert got.completion.finish_reason is FinishReason.LENGTH

    run(test())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_prompt_of_one_token_is_enough(architecture: str) -> None:
    async def test() -> None:
        async with serving(architecture, "miss=0.3") as served:
            got = await answer(served.generate, ids([65], 10, sampling=SAMPLED))
        assert got.token_ids == oracle([65], SAMPLED, 10)

    run(test())
