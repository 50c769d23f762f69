"""Every architecture on NxDI says what the target alone says, alone and batched, to the end of the sequence."""

from __future__ import annotations

import asyncio

import pytest

from tandem.engine.batcher import Batcher
from tandem.engine.engine import Engine
from tandem.engine.generators import plain_generator
from tandem.engine.load_models import Loaded
from tandem.runners.protocol import Runner
from tandem.speculation.types import GenerationRequest, SamplingParams
from tests.daily import daily
from tests.runners.nxdi.runners import SHAPE, Bench, application, bench, drafted  # noqa: F401
from tests.support import GREEDY, SAMPLED, Answer, answer, fused_site, ids, oracle, target_site
from tests.toy import ToyTokenizer

PROMPTS = (b"x", b"ab", b"a longer prompt, of thirty tokens", b"abc", b"another one")
BOTH = pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
SAMPLED_DAILY = pytest.mark.parametrize("sampling", daily([GREEDY, SAMPLED], 1), ids=["greedy", "sampled"])


def truth(prompt: bytes, sampling: SamplingParams, count: int) -> tuple[int, ...]:
    return oracle(prompt, sampling, count, past_the_end=True)


def asked(prompt: bytes, sampling: SamplingParams, total: int, **rest: int) -> GenerationRequest:
    return ids(prompt, total - len(prompt), sampling=sampling, ignore_end_of_sequence=True, **rest)


async def together(generator, requests) -> list[Answer]:
    return list(await asyncio.gather(*(answer(generator.generate, request) for request in requests)))


def loaded(runner: Runner, batcher: Batcher) -> Loaded:
    return Loaded(Engine(runner, batcher), ToyTokenizer())


@BOTH
async def test_plain_decoding_says_what_the_target_says_up_to_the_last_position(bench: Bench, sampling) -> None:  # noqa: F811
    generator = plain_generator(loaded(bench.target(), Batcher("test")))
    answers = await together(generator, [asked(p, sampling, SHAPE.max_length) for p in PROMPTS])
    for prompt, got in zip(PROMPTS, answers, strict=True):
        assert got.token_ids == truth(prompt, sampling, SHAPE.max_length - len(prompt))


@pytest.mark.parametrize("miss", daily([0.0, 0.3, 1.0], 1))
@SAMPLED_DAILY
async def test_a_draft_model_beside_the_target_changes_nothing(bench: Bench, sampling, miss: float) -> None:  # noqa: F811
    target, draft = loaded(bench.target(), Batcher("t")), loaded(bench.draft(miss), Batcher("d"))
    answers = await together(drafted(target, draft.engine), [asked(p, sampling, SHAPE.max_length) for p in PROMPTS])
    for prompt, got in zip(PROMPTS, answers, strict=True):
        assert got.token_ids == truth(prompt, sampling, SHAPE.max_length - len(prompt))
    if miss == 0:
        assert all(got.completion.stats.accepted == got.completion.stats.drafted for got in answers)


@pytest.mark.each_value
@pytest.mark.parametrize("miss", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
async def test_a_fused_graph_says_what_the_target_says_for_every_length(
    bench: Bench,  # noqa: F811
    miss: float,
    model_type: str,
) -> None:
    async with fused_site(*bench.pair(miss, model_type=model_type), k=4) as site, site.client() as client:
        requests = [asked(p, GREEDY, 64, speculation_length=k) for k, p in enumerate(PROMPTS)]
        answers = await together(client, requests)
    for prompt, got in zip(PROMPTS, answers, strict=True):
        assert got.token_ids == truth(prompt, GREEDY, 64 - len(prompt))
    assert [got.completion.stats.drafted > 0 for got in answers] == [False, True, True, True, True]


@pytest.mark.parametrize("service", ["fused", "tokens only"])
async def test_a_sampled_request_is_refused_at_the_request(bench: Bench, service: str) -> None:  # noqa: F811
    given = {"neuron_config": {"on_device_sampling_config": {"do_sample": False}}}
    serving = fused_site(*bench.pair()) if service == "fused" else target_site(bench.target(**given))
    async with serving as site, site.client() as client:
        with pytest.raises(Exception, match=r"temperature: 0\.9.*greedily only"):
            await answer(client.generate, asked(b"ab", SAMPLED, 20))
    assert not any(call["position_ids"] == [[0, 1]] for call in application().calls)  # nothing was prefilled for it


async def test_with_sampling_on_the_device_greedy_requests_are_served_from_its_tokens(bench: Bench) -> None:  # noqa: F811
    given = {"neuron_config": {"on_device_sampling_config": {"do_sample": False}}}
    target, draft = loaded(bench.target(**given), Batcher("t")), loaded(bench.draft(0.2, **given), Batcher("d"))
    answers = await together(drafted(target, draft.engine), [asked(p, GREEDY, 50) for p in PROMPTS])
    for prompt, got in zip(PROMPTS, answers, strict=True):
        assert got.token_ids == truth(prompt, GREEDY, 50 - len(prompt))
