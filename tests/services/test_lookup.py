"""Prompt lookup beside a target, over the wire: what is copied changes no token, and no copy is longer than asked."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from tandem.runners.toy import END, ToyConfig
from tandem.speculation.request import Drafts
from tandem.speculation.types import FinishReason, Rule, SamplingParams, Structure, StructureKind
from tests.services.test_sampling_features import BIAS, PROMPT, reference
from tests.support import GREEDY, ForgetfulRunner, Generate, answer, fused_site, ids, oracle, run, toy

STEADY = ToyConfig(step_seconds=0.002)
"""Steps that take no longer for more tokens, so that what is likely is copied."""
COUNT = 100
REPEATS = Structure(StructureKind.REGEX, r"(abcd[0-9] ){20}")
SAMPLINGS = {
    "greedy": GREEDY,
    "sampled": SamplingParams(temperature=0.05, seed=7),
    "penalties": SamplingParams(repetition_penalty=1.02, frequency_penalty=0.01, logit_bias=BIAS),
    "grammar": SamplingParams(structure=REPEATS, temperature=0.5, seed=3),
}


@contextlib.asynccontextmanager
async def copying(k: int | None = None, beside_a_model: bool = False) -> AsyncIterator[Generate]:
    """A target that sees one token only and so runs into a cycle. `beside_a_model`: lookup is a choice of requests."""
    target, draft = toy(STEADY, kind=ForgetfulRunner), toy(ToyConfig(salt=9)) if beside_a_model else None
    async with fused_site(target, draft, k, "hybrid") as site, site.client() as client:
        yield client.generate


@pytest.mark.parametrize("beside_a_model", [False, True])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_text_that_repeats_itself_is_copied_and_every_token_is_the_targets_own(
    name: str, beside_a_model: bool
) -> None:
    async def test() -> None:
        async with copying(None, beside_a_model) as generate:
            for k in (None, 3):
                asked = {"sampling": SAMPLINGS[name], "drafts": Drafts.LOOKUP, "speculation_length": k, "logprobs": 3}
                got = await answer(generate, ids(PROMPT, COUNT, **asked))
                assert (got.token_ids, got.logprobs) == reference(SAMPLINGS[name], COUNT, memory=1)
                stats = got.completion.stats
                assert stats.drafted_by == {"ngram": stats.drafted} and stats.accepted > 0
                assert stats.rounds + stats.accepted >= len(got.token_ids) > COUNT // 2

    run(test())


@pytest.mark.parametrize("k", [1, 2, 5, 0])
def test_a_length_that_was_asked_for_is_the_most_that_is_copied(k: int) -> None:
    async def test() -> None:
        request = ids(PROMPT, COUNT, ignore_end_of_sequence=True)
        for default, asked in ((k, request), (None, replace(request, speculation_length=k))):
            async with copying(default) as generate:
                got = await answer(generate, asked)
            assert got.token_ids == oracle(PROMPT, GREEDY, COUNT, past_the_end=True, memory=1)
            stats = got.completion.stats
            assert len(stats.rounds_by_length) - 1 == k and (stats.accepted > 10) == (k > 0)

    run(test())


def test_a_copy_runs_past_no_stop() -> None:
    """Copies of several tokens, in whose middle the text ends: by a token, a string, or its length."""
    text = oracle(PROMPT, GREEDY, COUNT, past_the_end=True, memory=1)
    cycle = text[-1 - text[-2::-1].index(text[-1]) - 1 :]  # from the last token's occurrence before it on

    async def test() -> None:
        async with copying() as generate:
            for length in (COUNT - 3, COUNT - 2, COUNT - 1):
                got = await answer(generate, ids(PROMPT, length, ignore_end_of_sequence=True))
                assert (got.token_ids, got.completion.finish_reason) == (text[:length], FinishReason.LENGTH)
            first = text.index(cycle[0])
            stop: dict[str, Any] = {"stop_token_ids": (cycle[0],), "ignore_end_of_sequence": True}
            got = await answer(generate, ids(PROMPT, COUNT, **stop))
            assert (got.token_ids, got.completion.finish_reason) == (text[: first + 1], FinishReason.STOP_TOKEN)
            whole = (await answer(generate, ids(PROMPT, COUNT, ignore_end_of_sequence=True))).text
            for at in (40, 60):
                string = whole[at : at + 5]
                stop = {"stop_strings": (string,), "ignore_end_of_sequence": True}
                got = await answer(generate, ids(PROMPT, COUNT, **stop))
                assert got.text == whole[: whole.index(string)]
                assert got.completion.finish_reason is FinishReason.STOP_STRING
                assert text[: len(got.token_ids)] == got.token_ids

    run(test())


def test_requests_that_copy_share_steps_with_others_and_are_exact() -> None:
    async def test() -> None:
        async with copying(beside_a_model=True) as generate:
            asked = [
                ids(bytes(range(60 + i, 70 + i)), COUNT - 7 * i, sampling=sampling, drafts=drafts)
                for i, (sampling, drafts) in enumerate(
                    (sampling, drafts)
                    for sampling in (GREEDY, SAMPLINGS["sampled"])
                    for drafts in (Drafts.LOOKUP, Drafts.NONE, Drafts.LOOKUP, Drafts.AUTO)
                )
            ]
            answers = await asyncio.gather(*(answer(generate, request) for request in asked))
        for request, got in zip(asked, answers, strict=True):
            assert got.token_ids == oracle(request.token_ids, request.sampling, request.max_new_tokens, memory=1)
        assert sum(got.completion.stats.accepted for got in answers) > 50

    run(test())


def test_where_tokens_depend_on_drafts_copies_do_not_depend_on_time() -> None:
    async def test() -> None:
        sampling = SamplingParams(temperature=0.7, seed=11)
        request = ids(PROMPT, COUNT, sampling=sampling, rule=Rule.REJECTION, drafts=Drafts.LOOKUP)
        async with copying(3) as generate:
            answers = [await answer(generate, request) for _ in range(3)]
        assert len({got.token_ids for got in answers}) == 1 and END not in answers[0].token_ids[:-1]
        assert len({got.completion.stats.drafted for got in answers}) == 1 and answers[0].completion.stats.drafted > 10

    run(test())
