"""Sequences on slots: what is kept, what is filled, and drafters whose cache never lies."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest

from tandem.engine.batcher import Batcher
from tandem.engine.engine import Engine
from tandem.engine.model_drafter import ModelDrafter
from tandem.speculation.types import LengthPlan, Request
from tests.support import GREEDY, SAMPLED, oracle, toy
from tests.toy import ToyConfig

PROMPT = list(b"a prompt that is longer than one chunk")


async def drafted(drafter: ModelDrafter, tokens: Sequence[int], k: int) -> tuple[int, ...]:
    return (await drafter.propose(tokens, LengthPlan(k, k))).token_ids


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
@pytest.mark.parametrize("seed", range(4))
async def test_a_drafter_proposes_what_a_fresh_one_would_whatever_was_accepted_before(sampling: Any, seed: int) -> None:
    """Full acceptance, partial, none; a skipped round; shorter and longer k: stale entries would show."""
    rng = random.Random(seed)
    engine = Engine(toy(ToyConfig(salt=2)), Batcher("test"))
    drafter = ModelDrafter(engine, Request(sampling), 258)
    await drafter.open(PROMPT)
    tokens = list(PROMPT)
    for accept in ["all", "none", "some", "all", "all, skip", "skip", "all", "some", "none", "none"]:
        k = rng.randrange(1, 6)
        draft = await drafted(drafter, tokens, k)
        assert draft == oracle(tokens, sampling, k, ToyConfig(salt=2), past_the_end=True)
        count = {"all": k, "none": 0, "some": rng.randrange(k + 1), "skip": 0, "all, skip": k}[accept]
        tokens += [*draft[:count], rng.randrange(256)]
        if "skip" in accept:  # rounds that this drafter never saw
            tokens += [rng.randrange(256) for _ in range(3)]
    await drafter.close()
    assert engine.slots.free == 4
    await engine.batcher.close()


async def test_a_drafter_survives_a_cancelled_proposal() -> None:
    engine = Engine(toy(ToyConfig(step_seconds=0.01)), Batcher("test"))
    drafter = ModelDrafter(engine, Request(GREEDY), 258)
    await drafter.open(PROMPT)
    task = asyncio.create_task(drafter.propose([*PROMPT, 1, 2, 3], LengthPlan(5, 5)))
    await asyncio.sleep(0.005)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert await drafted(drafter, PROMPT, 4) == oracle(PROMPT, GREEDY, 4, past_the_end=True)
    await drafter.close()
    await engine.batcher.close()
