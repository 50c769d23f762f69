"""A draft model with fewer positions than its target: the target goes on alone beyond them, with the same tokens."""

from __future__ import annotations

import asyncio

import pytest

from tandem.speculation.request import Drafts
from tandem.speculation.types import SamplingParams
from tandem.speculation.verification_mode import Pipeline
from tests.architectures import PLACES, serving
from tests.support import answer, ids, oracle

GREEDY = SamplingParams()
SHORT, LONG = 60, 160
DISTRIBUTED = ("draft_role", "pipelined", "never_waiting", "chosen", "remote_draft", "remote_run", "remote_chosen")
PLACED = [("fused", "model"), ("fused", "hybrid"), *((name, "model") for name in DISTRIBUTED)]


@pytest.mark.parametrize(("architecture", "kind"), PLACED)
async def test_tokens_are_the_targets_across_the_last_position_of_the_draft(architecture: str, kind: str) -> None:
    async with serving(architecture, "salt=0", kind, k=5, draft_length=SHORT) as served:
        assert served.info.max_sequence_length == LONG
        prompts = [bytes(range(65, 65 + length)) for length in (9, 30, SHORT - 2, SHORT - 1, SHORT, SHORT + 1, 90)]
        asked = [ids(p, 65, sampling=GREEDY, ignore_end_of_sequence=True) for p in prompts]
        both = [*asked, *(ids(p, 65, ignore_end_of_sequence=True, drafts=Drafts.NONE) for p in prompts[:2])]
        answers = await asyncio.gather(*(answer(served.generate, each) for each in both[:4]))
        answers += [await answer(served.generate, each) for each in both[4:]]
        for request, got in zip(both, answers, strict=True):
            assert got.token_ids == oracle(request.token_ids, GREEDY, 65, past_the_end=True)
        drafted = [got.completion.stats.drafted for got in answers]
        drops = PLACES[architecture][1] not in (Pipeline.OFF, Pipeline.ON)  # drafts that are late
        assert drops or (drafted[0] > 20 and drafted[1] > 5)
        if kind != "hybrid":
            assert drafted[4:7] == [0, 0, 0]
        assert all(got.completion.stats.undrafted_rounds == 0 for got in answers)
