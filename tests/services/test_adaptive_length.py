"""Lengths that adapt change no token, in any architecture; and what is asked for by number stays fixed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from tandem.engine.model_config import DraftChoice, ModelConfig
from tandem.runners.loading import Shape
from tandem.runners.toy import ToyConfig
from tandem.speculation.depth import Pipeline
from tandem.speculation.types import ModelInfo, Rule
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

ARCHITECTURES = ("fused", "draft_worker", "draft_role", "remote_draft")
PROMPT = b"abcabcabc"
COUNT = 48


def hybrid(k: int | None = None) -> ModelConfig:
    """Copies, else a toy model that misses 3 in 10."""
    return ModelConfig(shape=Shape(4, 160, 5), draft=DraftChoice("hybrid", "miss=0.3"), backend="toy", default_k=k)


@contextlib.asynccontextmanager
async def asking(architecture: str) -> AsyncIterator[tuple[Generate, ModelInfo]]:
    """`generate` of an architecture whose lengths adapt, and what it says it is."""
    if architecture == "fused":
        noisy = toy(ToyConfig(miss=0.3))
        async with fused_site(toy(), noisy, k=None, kind="hybrid") as site, site.client() as client:
            yield client.generate, await client.model_info()
    elif architecture == "remote_draft":
        async with (
            worker_site(None, config=hybrid()) as worker,
            remote_draft(worker.address, toy(), k=None) as (generator, _),
        ):
            yield generator.generate, generator.info
    else:
        async with target_site() as target:
            if architecture == "draft_worker":
                worker = worker_site(target.address, config=hybrid(), pipeline=Pipeline.OFF)
                async with worker as site, site.client() as client:
                    yield client.generate, await client.model_info()
            else:
                async with distributed(target.address, "miss=0.3", k=None) as (generator, _):
                    yield generator.generate, generator.info


@pytest.mark.parametrize("architecture", daily(ARCHITECTURES, 0, 1))
def test_tokens_are_the_targets_own_whatever_lengths_are_chosen_or_asked_for(architecture: str) -> None:
    async def test() -> None:
        async with asking(architecture) as (generate, info):
            assert info.adaptive_speculation_length
            assert (info.default_speculation_length, info.max_speculation_length) == (3, 5)
            for sampling in (GREEDY, SAMPLED):
                expected = oracle(PROMPT, sampling, COUNT)
                for k in (None, 0, 1, 2, 3, 5, None):
                    got = await answer(generate, ids(PROMPT, COUNT, sampling=sampling, speculation_length=k))
                    assert got.token_ids == expected, f"k={k}"
                    stats = got.completion.stats
                    assert len(stats.rounds_by_length) - 1 <= (5 if k is None else k)
                    assert sum(stats.rounds_by_length) == stats.rounds
                    assert sum(n * rounds for n, rounds in enumerate(stats.rounds_by_length)) == stats.drafted

    run(test())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_first_rounds_of_a_process_try_lengths_far_apart(architecture: str) -> None:
    async def test() -> None:
        async with asking(architecture) as (generate, _):
            got = await answer(generate, ids(b"xyz", COUNT))
        tried = got.completion.stats.rounds_by_length
        assert tried[0] and tried[-1] and len(tried) == 6

    run(test())


@pytest.mark.parametrize("architecture", daily(ARCHITECTURES, 2, 3))
def test_many_requests_at_once_whose_lengths_adapt_do_not_disturb_each_other(architecture: str) -> None:
    requests = [
        ids(bytes(range(40 + i, 43 + 6 * i)), 30, sampling=replace(SAMPLED, seed=i) if i % 2 else GREEDY)
        for i in range(8)
    ]

    async def test() -> None:
        async with asking(architecture) as (generate, _):
            answers = await asyncio.gather(*(answer(generate, request) for request in requests))
        for request, got in zip(requests, answers, strict=True):
            assert got.token_ids == oracle(request.token_ids, request.sampling, request.max_new_tokens)

    run(test())


@pytest.mark.parametrize("architecture", daily(ARCHITECTURES, 0, 2))
def test_sampled_under_rejection_the_length_is_fixed_so_that_a_retry_says_the_same(architecture: str) -> None:
    async def test() -> None:
        async with asking(architecture) as (generate, _):
            request = ids(PROMPT, COUNT, sampling=SAMPLED, rule=Rule.REJECTION)
            default = await answer(generate, request)
            assert default.token_ids == (await answer(generate, request)).token_ids
            fixed = await answer(generate, replace(request, speculation_length=3))
            assert default.token_ids == fixed.token_ids

    run(test())
