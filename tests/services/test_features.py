"""Features over the wire: a toy head elsewhere is an oracle. With all of them in place it is always right."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from tandem.engine.loading import ModelConfig
from tandem.runners.toy import ToyRunner
from tandem.speculation.depth import Pipeline
from tandem.speculation.features import FeatureFormat, FeatureWish
from tests.support import GREEDY, SAMPLED, answer, distributed, draft_config, ids, oracle, run, target_site, toy

PROMPT = b"a prompt of more tokens than a prefill step takes, and more than a head is told of"


def head_config(head: str = "head", kind: str = "eagle", slots: int = 4, k: int | None = 3, **wish: Any) -> ModelConfig:
    return draft_config(None, slots, 200, k, kind=kind, model=head, features=FeatureWish(**wish))


def target(slots: int = 4, kind: Any = ToyRunner) -> ToyRunner:
    return toy(slots=slots, max_length=200, kind=kind)


@pytest.mark.parametrize("number_format", FeatureFormat)
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
@pytest.mark.parametrize("context", [1, 7, 256])
def test_a_head_elsewhere_that_gets_every_feature_is_always_right(
    sampling: Any, number_format: FeatureFormat, context: int
) -> None:
    async def test() -> None:
        config = head_config(context=context, format=number_format)
        async with (
            target_site(target(), features=()) as site,
            distributed(site.address, config=config) as (generator, _),
        ):
            for prompt in (PROMPT, b"ab", b"a"):
                for k in (1, 3, 5):
                    asked = ids(prompt, 60, sampling=sampling, speculation_length=k)
                    got = await answer(generator.generate, asked)
                    assert got.token_ids == oracle(prompt, sampling, 60)
                    stats = got.completion.stats
                    assert stats.accepted == stats.drafted > 0, (prompt, k)
                    assert stats.rounds <= -(-60 // (k + 1)) + 1

    run(test())


@pytest.mark.parametrize("pipeline", [Pipeline.ON, Pipeline.NEVER_WAITING, Pipeline.AUTO])
@pytest.mark.parametrize("kind", ["eagle", "hybrid"])
def test_rounds_ahead_and_runs_use_features_too(pipeline: Pipeline, kind: str) -> None:
    async def test() -> None:
        async with (
            target_site(target(), features=()) as site,
            distributed(site.address, pipeline=pipeline, config=head_config(kind=kind)) as (generator, _),
        ):
            draws = [GREEDY, *(replace(SAMPLED, seed=i) for i in range(3))]
            asked = [ids(PROMPT[: 5 + 7 * i], 100, sampling=one) for i, one in enumerate(draws)]
            answers = await asyncio.gather(*(answer(generator.generate, one) for one in asked))
            for one, got in zip(asked, answers, strict=True):
                assert got.token_ids == oracle(one.token_ids, one.sampling, 100)
                stats = got.completion.stats
                assert stats.feature_bytes > 0
                if kind == "eagle":
                    assert stats.accepted == stats.drafted, stats
                assert stats.accepted or pipeline is not Pipeline.ON

    run(test())
