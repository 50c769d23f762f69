"""G1: every architecture says, token for token, what the target alone says with that seed."""

from __future__ import annotations

import pytest

from tandem.speculation.types import FinishReason
from tests.architectures import ARCHITECTURES, serving
from tests.daily import daily
from tests.support import GREEDY, SAMPLED, answer, ids, oracle

PROMPT = b"abcabcabc"


@pytest.mark.parametrize("architecture", daily(ARCHITECTURES, 0, 1, 2, 6, 7))
async def test_a_sequence_may_be_filled_to_its_last_position(architecture: str) -> None:
    async with serving(architecture, "miss=0.3") as served:
        got = await answer(served.generate, ids(PROMPT, None, ignore_end_of_sequence=True))
    assert len(got.token_ids) == 160 - len(PROMPT)
    assert got.token_ids == oracle(PROMPT, GREEDY, len(got.token_ids), past_the_end=True)
    assert got.completion.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("architecture", ARCHITECTURES)
async def test_a_prompt_of_one_token_is_enough(architecture: str) -> None:
    async with serving(architecture, "miss=0.3") as served:
        got = await answer(served.generate, ids([65], 10, sampling=SAMPLED))
    assert got.token_ids == oracle([65], SAMPLED, 10)
