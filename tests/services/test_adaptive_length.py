"""Lengths that adapt change no token, in any architecture; and what is asked for by number stays fixed."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from dataclasses import replace

import pytest

from tandem.speculation.types import Rule
from tests.architectures import Served, serving
from tests.daily import daily
from tests.support import (
    SAMPLED,
    answer,
    ids,
    run,
)

ARCHITECTURES = ("fused", "draft_worker", "draft_role", "remote_draft")
PROMPT = b"abcabcabc"
COUNT = 48


def adapting(architecture: str) -> AbstractAsyncContextManager[Served]:
    """Lengths adapt; copies draft before a toy model that misses 3 in 10, the role has the model alone."""
    return serving(architecture, "miss=0.3", "" if architecture == "draft_role" else "hybrid", k=None)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_first_rounds_of_a_process_try_lengths_far_apart(architecture: str) -> None:
    async def test() -> None:
        async with adapting(architecture) as served:
            got = await answer(served.generate, ids(b"xyz", COUNT))
        tried = got.completion.stats.rounds_by_length
        assert tried[0] and tried[-1] and len(tried) == 6

    run(test())


@pytest.mark.parametrize("architecture", daily(ARCHITECTURES, 0, 2))
def test_sampled_under_rejection_the_length_is_fixed_so_that_a_retry_says_the_same(architecture: str) -> None:
    async def test() -> None:
        async with adapting(architecture) as served:
            request = ids(PROMPT, COUNT, sampling=SAMPLED, rule=Rule.REJECTION)
            default = await answer(served.generate, request)
            assert default.token_ids == (await answer(served.generate, request)).token_ids
            fixed = await answer(served.generate, replace(request, speculation_length=3))
            assert default.token_ids == fixed.token_ids

    run(test())
