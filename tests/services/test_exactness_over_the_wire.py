"""G1: every architecture says, token for token, what the target alone says with that seed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import pytest

from tandem.runners.toy import ToyConfig
from tandem.speculation.depth import Pipeline
from tandem.speculation.types import FinishReason
from tests.daily import daily
from tests.support import (
    GREEDY,
    SAMPLED,
    Generate,
    answer,
    distributed,
    fused_site,
    ids,
    oracle,
    remote_draft,
    run,
    target_site,
    toy,
    worker_site,
)

WAITING = ("autoregressive", "fused", "draft_worker", "draft_role", "pipelined", "remote_draft")
NEVER_WAITING = ("never_waiting", "remote_run", "chosen")
ARCHITECTURES = (*WAITING, *NEVER_WAITING)
PIPELINES = {"pipelined": Pipeline.ON, "never_waiting": Pipeline.NEVER_WAITING, "chosen": Pipeline.AUTO}
DRAFTS = {"perfect": "salt=0", "noisy": "miss=0.3", "always wrong": "salt=9", "n-gram": None}
PROMPT = b"abcabcabc"


@contextlib.asynccontextmanager
async def asking(architecture: str, draft: str | None, slots: int = 4) -> AsyncIterator[Generate]:
    """`generate` of an architecture whose draft is of that kind."""
    if architecture == "fused":
        values = {} if draft is None else {"salt": int(draft == "salt=9"), "miss": 0.3 * (draft == "miss=0.3")}
        drafter = None if draft is None else toy(ToyConfig(**values), slots)
        async with fused_site(toy(slots=slots), drafter) as site, site.client() as client:
            yield client.generate
        return
    if architecture in ("remote_draft", "remote_run"):
        pipeline = Pipeline.NEVER_WAITING if architecture == "remote_run" else Pipeline.OFF
        async with (
            worker_site(None, draft, slots) as worker,
            remote_draft(worker.address, toy(slots=slots), pipeline=pipeline) as (generator, _),
        ):
            yield generator.generate
        return
    async with target_site(toy(slots=slots)) as target:
        if architecture == "autoregressive":
            async with target.client() as client:
                yield client.generate
        elif architecture == "draft_worker":
            worker = worker_site(target.address, draft, slots, pipeline=Pipeline.OFF)
            async with worker as site, site.client() as client:
                yield client.generate
        else:
            pipeline = PIPELINES.get(architecture, Pipeline.OFF)
            async with distributed(target.address, draft, slots, pipeline=pipeline) as (generator, _):
                yield generator.generate


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
        async with asking(architecture, DRAFTS[draft]) as generate:
            for sampling in (GREEDY, SAMPLED, replace(SAMPLED, temperature=1.5, top_k=0, top_p=1.0, min_p=0.0)):
                expected = oracle(PROMPT, sampling, 24)
                for k in lengths:
                    got = await answer(generate, ids(PROMPT, 24, sampling=sampling, speculation_length=k))
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
        async with asking(architecture, DRAFTS[draft], slots=3) as generate:
            answers = await asyncio.gather(*(answer(generate, request) for request in requests))
        for request, got in zip(requests, answers, strict=True):
            assert got.token_ids == oracle(request.token_ids, request.sampling, request.max_new_tokens)

    run(test())


def test_a_seed_repeats_and_another_seed_says_something_else() -> None:
    async def test() -> None:
        async with asking("draft_worker", "miss=0.3") as generate:
            outputs = [
                (await answer(generate, ids(PROMPT, 24, sampling=replace(SAMPLED, seed=seed)))).token_ids
                for seed in (1, 1, 2, 2**64 - 1)
            ]
        assert outputs[0] == outputs[1]
        assert len(set(outputs)) == 3

    run(test())


@pytest.mark.parametrize("architecture", daily(ARCHITECTURES, 0, 1, 2, 6, 7))
def test_a_sequence_may_be_filled_to_its_last_position(architecture: str) -> None:
    async def test() -> None:
        async with asking(architecture, "miss=0.3") as generate:
            got = await answer(generate, ids(PROMPT, None, ignore_end_of_sequence=True))
        assert len(got.token_ids) == 160 - len(PROMPT)
        assert got.token_ids == oracle(PROMPT, GREEDY, len(got.token_ids), past_the_end=True)
        assert got.completion.finish_reason is FinishReason.LENGTH

    run(test())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_prompt_of_one_token_is_enough(architecture: str) -> None:
    async def test() -> None:
        async with asking(architecture, "miss=0.3") as generate:
            got = await answer(generate, ids([65], 10, sampling=SAMPLED))
        assert got.token_ids == oracle([65], SAMPLED, 10)

    run(test())
