"""A predicted output is found again after each difference, and contradictions are refused."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.clients.completion import request_of
from tandem.rpc.errors import TandemError
from tandem.speculation.request import GenerationRequest
from tandem.speculation.types import InvalidField, Rule
from tests.architectures import serving
from tests.support import SAMPLED, Generate, answer, ids

PROMPT = b"a file"
COUNT = 60


async def said(generate: Generate, **asked: Any) -> Any:
    return await answer(generate, ids(PROMPT, COUNT, **asked))


async def test_what_contradicts_a_prediction_is_refused_by_its_name() -> None:
    for contradiction in ({"speculation_length": 0}, {"drafts": "none"}, {"drafts": "model"}):
        with pytest.raises(InvalidField, match="prediction: it drafts: drafts must be auto or lookup"):
            request_of("a", None, (), prediction="b", **contradiction)
    assert GenerationRequest(text="a", prediction="", speculation_length=0)
    async with serving("autoregressive") as served:
        with pytest.raises(TandemError, match="the prediction has 100000 bytes and this server takes"):
            await said(served.generate, prediction="a" * 100_000)


async def test_under_rejection_a_prediction_drafts_too() -> None:
    async with serving("fused", None) as served:
        got = await said(served.generate, sampling=SAMPLED, rule=Rule.REJECTION, prediction="some text")
        assert got.completion.stats.drafted > 0


A, B, C, D, E, F, G, X = range(8)
