"""Features over the wire: a toy head elsewhere is an oracle. With all of them in place it is always right."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tandem.engine.drafting import check_has_target
from tandem.engine.model_config import ModelConfig
from tandem.engine.prefix_cache import PrefixSharing, share_prefixes
from tandem.runners.toy import ToyRunner
from tandem.speculation.depth import Pipeline
from tandem.speculation.features import FeatureFormat, FeatureInbox, FeatureSpec, FeatureWish
from tandem.speculation.types import Chunk, InvalidField, Rule, SpeculationStats
from tests.support import (
    GREEDY,
    SAMPLED,
    ForgetfulRunner,
    answer,
    distributed,
    draft_config,
    drafting,
    ids,
    let_all_expire,
    oracle,
    run,
    target_site,
    toy,
    worker_site,
)

WAYS = (Pipeline.ON, Pipeline.NEVER_WAITING, Pipeline.AUTO)
PROMPT = b"a prompt of more tokens than a prefill step takes, and more than a head is told of"


def head_config(head: str = "head", kind: str = "eagle", slots: int = 4, k: int | None = 3, **wish: Any) -> ModelConfig:
    return draft_config(None, slots, 200, k, kind=kind, model=head, features=FeatureWish(**wish))


def target(slots: int = 4, kind: Any = ToyRunner) -> ToyRunner:
    return toy(slots=slots, max_length=200, kind=kind)


@pytest.mark.parametrize("number_format", FeatureFormat)
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_a_head_elsewhere_that_gets_every_feature_is_always_right(sampling: Any, number_format: FeatureFormat) -> None:
    async def test() -> None:
        for context in (1, 256):
            config = head_config(context=context, format=number_format)
            async with (
                target_site(target(), features=()) as site,
                distributed(site.address, config=config) as (generator, _),
            ):
                for prompt, k in ((PROMPT, 1), (PROMPT, 5), (b"ab", 3), (b"a", 3)):
                    asked = ids(prompt, 60, sampling=sampling, speculation_length=k)
                    got = await answer(generator.generate, asked)
                    assert got.token_ids == oracle(prompt, sampling, 60)
                    stats = got.completion.stats
                    assert stats.accepted == stats.drafted > 0, (prompt, k)
                    assert stats.rounds <= -(-60 // (k + 1)) + 1

    run(test())


@pytest.mark.parametrize("pipeline", WAYS)
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
                if kind == "eagle" and pipeline is not Pipeline.AUTO:  # what is in flight at a change of ways is lost
                    assert stats.accepted == stats.drafted, stats
                assert stats.accepted or pipeline is not Pipeline.ON

    run(test())


def test_bytes_are_those_of_the_settled_positions_and_no_others() -> None:
    """Features of rejected drafts stay where they are; of a long prompt only the last positions come."""

    async def test() -> None:
        async with target_site(target(), features=()) as site:
            for wish, each in ((FeatureWish(context=9), 2 * 8), (FeatureWish(FeatureFormat.INT8), 4 + 8)):
                config = draft_config(None, 4, 200, kind="eagle", model="head,miss=0.4", features=wish)
                async with distributed(site.address, config=config) as (generator, _):
                    got = await answer(generator.generate, ids(PROMPT, 60, speculation_length=4))
                stats = got.completion.stats
                assert got.token_ids == oracle(PROMPT, GREEDY, 60) and 0 < stats.accepted < stats.drafted
                positions = min(wish.context, len(PROMPT) - 1) + stats.accepted + stats.rounds
                assert stats.feature_bytes == 3 * each * positions
                assert stats.feature_bytes < stats.bytes_down < stats.feature_bytes + 150 * stats.rounds

    run(test())


def test_a_worker_counts_features_in_its_statistics_and_metrics() -> None:
    async def test() -> None:
        async with (
            target_site(target(), features=()) as site,
            worker_site(site.address, config=head_config(), pipeline=Pipeline.OFF) as worker,
            worker.client() as client,
        ):
            got = await answer(client.generate, ids(PROMPT, 40))
            assert got.completion.stats.feature_bytes > 40 * 3 * 16
            assert (await client.model_info()).draft_name == "toy-head"

    run(test())


def test_without_features_lookup_drafts_alone_or_the_head_is_refused_by_name() -> None:
    async def test() -> None:
        async with target_site(target(kind=ForgetfulRunner)) as site:
            for kind in ("hybrid", "auto"):
                async with distributed(site.address, config=head_config(kind=kind)) as (generator, _):
                    assert generator.info.draft_name == "ngram"
                    got = await answer(generator.generate, ids(PROMPT, 60))
                    assert got.token_ids == oracle(PROMPT, GREEDY, 60, memory=1)
                    stats = got.completion.stats
                    assert stats.accepted and not stats.feature_bytes and set(stats.drafted_by) == {"ngram"}
            for kind in ("eagle", "model"):
                with pytest.raises(ValueError, match="hands none out; start it with --hand_out_features"):
                    async with distributed(site.address, config=head_config(kind=kind)):
                        pass
        async with target_site(target(), features=(1, 2)) as site:
            with pytest.raises(ValueError, match=r"reads layer 3, and the target at .* --hand_out_features 3,1,2"):
                async with distributed(site.address, config=head_config()):
                    pass

    run(test())


def test_a_target_without_features_met_at_a_failover_costs_drafts_and_no_token() -> None:
    async def test() -> None:
        async with target_site(target(), features=()) as first, target_site(target(), features=()) as second:
            addresses = f"{first.address},{second.address}"
            async with distributed(addresses, config=head_config()) as (generator, client):
                client.pool.current = first.address
                assert second.engine
                second.engine.features = None  # as one that was started without, or an older one
                tokens: list[int] = []
                stats = SpeculationStats()
                async for event in generator.generate(ids(PROMPT, 60), stats):
                    if not tokens:
                        client.pool.failed(first.address, "gone")
                        await let_all_expire(first)
                    tokens += event.token_ids if isinstance(event, Chunk) else ()
                assert tuple(tokens) == oracle(PROMPT, GREEDY, 60)
                assert 0 < stats.feature_bytes < (len(PROMPT) + 30) * 48
                assert stats.rounds > 40 and stats.accepted == stats.drafted > 0

    run(test())


def test_one_who_only_proposes_has_no_head_and_a_worker_proposes_by_lookup() -> None:
    async def test() -> None:
        async with drafting(head_config()) as drafts:
            assert drafts.head is not None
            with pytest.raises(ValueError, match=r"toy-head is an EAGLE head.*Propose, ProposeStream\) send none"):
                check_has_target(drafts)
            drafter = drafts.drafter(258)
            await drafter.open([1, 2, 3, 1, 2], GREEDY)
            draft = await drafter.propose([1, 2, 3, 1, 2], 2)
            assert draft.token_ids == (3, 1)

    run(test())


def test_rejection_waits_for_its_features_and_repeats() -> None:
    async def test() -> None:
        config = draft_config(None, 4, 200, kind="eagle", model="head,miss=0.4")
        async with target_site(target(), features=()) as site:
            said = set()
            for pipeline in (Pipeline.OFF, *WAYS):
                async with distributed(site.address, pipeline=pipeline, config=config) as (generator, _):
                    asked = ids(PROMPT, 40, sampling=SAMPLED, rule=Rule.REJECTION, speculation_length=4)
                    got = await answer(generator.generate, asked)
                    assert got.completion.stats.accepted
                    said.add(got.token_ids)
            assert len(said) == 1

    run(test())


def test_features_that_are_no_whole_positions_end_the_request_by_name() -> None:
    inbox = FeatureInbox(FeatureSpec((1, 2, 3), 8, FeatureFormat.INT8))
    with pytest.raises(InvalidField, match="37 bytes are not positions of 36"):
        inbox.opened(0, bytes(37))
    assert inbox.wanted(1000) == 1000 - 1 - inbox._context


def test_number_formats_lose_what_they_say() -> None:
    values = np.random.default_rng(0).normal(size=(50, 2, 64)).astype(np.float32)
    values[3, 1, 5], values[4] = np.nan, 0
    sound = np.nan_to_num(values).reshape(50, -1)
    for number_format, most in ((FeatureFormat.BFLOAT16, 2**-8), (FeatureFormat.INT8, 0.5 / 127)):
        spec = FeatureSpec((1, 4), 64, number_format)
        data = spec.encode(values)
        assert len(data) == 50 * spec.position_bytes
        off = np.abs(spec.decode(data) - sound).reshape(50, 2, 64)
        scale = np.abs(sound).reshape(50, 2, 64)
        allowed = scale if number_format is FeatureFormat.BFLOAT16 else scale.max(axis=-1, keepdims=True)
        assert (off <= 1.001 * most * allowed).all() and off.max() > 0
        assert spec.encode(spec.decode(data).reshape(50, 2, 64)) == data  # what was rounded stays


def test_a_prefix_that_is_copied_brings_its_features() -> None:
    async def test() -> None:
        prompt = [*PROMPT, *PROMPT]
        async with target_site(target(), features=()) as site, distributed(site.address, config=head_config()) as made:
            assert site.engine
            await share_prefixes([site.engine], PrefixSharing("all", 1), lambda: "")
            for again in (False, True):
                got = await answer(made[0].generate, ids(prompt, 30))
                stats = got.completion.stats
                assert got.token_ids == oracle(prompt, GREEDY, 30) and stats.accepted == stats.drafted > 0
                assert (stats.cached_prompt_tokens > 0) == again

    run(test())


class FixedSteps(ToyRunner):
    """A target whose steps were made before anybody asked for features."""

    def hand_out(self, layers: Any) -> Any:
        raise ValueError("graphs were made without them")


def test_a_target_that_cannot_hand_out_says_so_by_name() -> None:
    async def refusal(runner: Any, layers: tuple[int, ...] = ()) -> str:
        with pytest.raises(ValueError) as refused:
            async with target_site(runner, features=layers):
                pass
        return str(refused.value)

    async def test() -> None:
        assert "use --compile native or off: graphs were made" in await refusal(target(kind=FixedSteps))
        assert "layers 1, 9 are not all within 1 to 3" in await refusal(target(), (1, 9))
        assert "steps hand out no hidden states" in await refusal(Bare(target()))

    run(test())


class Bare:
    """A runner without anything but the protocol's."""

    def __init__(self, runner: ToyRunner) -> None:
        self.limits, self.identity, self.shapes = runner.limits, runner.identity, runner.shapes
