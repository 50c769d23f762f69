"""A predicted output is found again after each difference, and contradictions are refused."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.clients.completion import request_of
from tandem.rpc.errors import TandemError
from tandem.speculation.drafters import PredictionDrafter
from tandem.speculation.request import GenerationRequest
from tandem.speculation.types import InvalidField, Rule
from tests.architectures import serving
from tests.support import SAMPLED, Generate, answer, ids, run

PROMPT = b"a file"
COUNT = 60


async def said(generate: Generate, **asked: Any) -> Any:
    return await answer(generate, ids(PROMPT, COUNT, **asked))


def test_what_contradicts_a_prediction_is_refused_by_its_name() -> None:
    for contradiction in ({"speculation_length": 0}, {"drafts": "none"}, {"drafts": "model"}):
        with pytest.raises(InvalidField, match="prediction: it drafts: drafts must be auto or lookup"):
            request_of("a", None, (), prediction="b", **contradiction)
    assert GenerationRequest(text="a", prediction="", speculation_length=0)

    async def test() -> None:
        async with serving("autoregressive") as served:
            with pytest.raises(TandemError, match="the prediction has 100000 bytes and this server takes"):
                await said(served.generate, prediction="a" * 100_000)

    run(test())


def test_under_rejection_a_prediction_drafts_too() -> None:
    async def test() -> None:
        async with serving("fused", None) as served:
            got = await said(served.generate, sampling=SAMPLED, rule=Rule.REJECTION, prediction="some text")
            assert got.completion.stats.drafted > 0

    run(test())


A, B, C, D, E, F, G, X = range(8)
LONG = list(range(10, 30))


@pytest.mark.parametrize(
    ("predicted", "output", "follows"),
    [
        (LONG, [], LONG[:3]),
        (LONG, LONG[:2], LONG[2:5]),
        (LONG, [*LONG[:6], X], ()),  # what was put in place of the next, or before it, is not known yet
        (LONG, [*LONG[:6], X, LONG[7]], LONG[8:11]),  # in place of a token
        (LONG, [*LONG[:6], X, LONG[6]], LONG[7:10]),  # before it
        (LONG, [*LONG[:6], LONG[9]], LONG[10:13]),  # some were left out
        ([A, B, C, A, B, D, A, B, E], [A, B, D], [A, B, E]),  # most of the last tokens agree
        ([A, X, B, X, C, X, D, X, E], [A, X, B, X, F, X], [D, X, E]),  # the nearest of places alike
        (LONG, LONG, ()),
        ([], [A], ()),
    ],
)
def test_a_prediction_goes_on_where_it_agrees_with_the_output(
    predicted: list[int], output: list[int], follows: list[int] | tuple[int, ...]
) -> None:
    async def test() -> None:
        drafter = PredictionDrafter(predicted)
        await drafter.open([1, 2])
        assert (await drafter.propose([1, 2, *output, 99, 98], 3)).token_ids is not None  # and these are taken back
        assert list((await drafter.propose([1, 2, *output], 3)).token_ids) == list(follows)

    run(test())
