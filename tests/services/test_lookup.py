"""Prompt lookup beside a target: under the rejection rule copies do not depend on time."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from tandem.speculation.request import Drafts
from tandem.speculation.types import Rule, SamplingParams
from tests.services.test_sampling_features import PROMPT
from tests.support import ForgetfulRunner, Generate, answer, fused_site, ids, toy
from tests.toy import END, ToyConfig

STEADY = ToyConfig(step_seconds=0.002)
"""Steps that take no longer for more tokens, so that what is likely is copied."""
COUNT = 100


@contextlib.asynccontextmanager
async def copying(k: int | None = None, beside_a_model: bool = False) -> AsyncIterator[Generate]:
    """A target that sees one token only and so runs into a cycle. `beside_a_model`: lookup is a choice of requests."""
    target, draft = toy(STEADY, kind=ForgetfulRunner), toy(ToyConfig(salt=9)) if beside_a_model else None
    async with fused_site(target, draft, k, "hybrid") as site, site.client() as client:
        yield client.generate


async def test_where_tokens_depend_on_drafts_copies_do_not_depend_on_time() -> None:
    sampling = SamplingParams(temperature=0.7, seed=11)
    request = ids(PROMPT, COUNT, sampling=sampling, rule=Rule.REJECTION, drafts=Drafts.LOOKUP)
    async with copying(3) as generate:
        answers = [await answer(generate, request) for _ in range(3)]
    assert len({got.token_ids for got in answers}) == 1 and END not in answers[0].token_ids[:-1]
    assert len({got.completion.stats.drafted for got in answers}) == 1 and answers[0].completion.stats.drafted > 10
