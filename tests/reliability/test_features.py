"""Features under faults: lost, repeated and late replies, expired leases, and sessions that go on at another target.

The toy head knows the target's tokens if each feature is the right one and in its place, so one rejected draft shows a
feature that a fault has spoiled.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter

import pytest

from tandem.engine.model_config import DraftChoice, ModelConfig
from tandem.runners.load_runner import Shape
from tandem.services.target_verifier import TargetVerifierService
from tandem.speculation.verification_mode import Pipeline
from tests.daily import daily
from tests.reliability.campaign import DEADLINES, _expire
from tests.reliability.faults import FaultInterceptor, Schedule
from tests.reliability.history import History, count_faults
from tests.support import GREEDY, SAMPLED, answer, distributed, ids, oracle, target_site, toy
from tests.toy import ToyConfig

PROMPT = b"A prompt that is longer than one step of a prefill takes"
WAYS = (Pipeline.OFF, Pipeline.ON, Pipeline.NEVER_WAITING)


async def schedule(seed: int, pipeline: Pipeline) -> Counter[str]:
    """One request to two targets; returns the faults."""
    chance = random.Random(f"features {seed}")
    prompt, sampling = (65 + seed % 4, *PROMPT[: chance.randrange(len(PROMPT))]), chance.choice([GREEDY, SAMPLED])
    draft = DraftChoice("eagle", "head", chance.choice([3, 256]))
    config = ModelConfig(shape=Shape(4, 160, 5), draft=draft, backend="toy")
    history = History("targets")
    async with contextlib.AsyncExitStack() as stack:
        addresses = []
        for number in range(2):
            faults = FaultInterceptor(Schedule(seed * 10 + number, chance.choice([0.1, 0.3]), 2), history)
            target = toy(ToyConfig(step_seconds=0.03), chunk=8)  # six requests on one loop: drafts need time to come
            site = await stack.enter_async_context(target_site(target, interceptors=[faults], features=()))
            assert isinstance(site.verifier, TargetVerifierService)
            faults.expire = lambda session, service=site.verifier: _expire(service, session)
            addresses.append(site.address)
        generator, client = await stack.enter_async_context(
            distributed(",".join(addresses), pipeline=pipeline, config=config)
        )
        client.deadlines = DEADLINES
        got = await answer(generator.generate, ids(prompt, 60, sampling=sampling))
    stats = got.completion.stats
    assert got.token_ids == oracle(prompt, sampling, 60)
    assert stats.accepted == stats.drafted, f"seed {seed}: {stats}"
    assert stats.drafted >= (len(got.token_ids) // 2 if pipeline is Pipeline.OFF else 1), f"seed {seed}: {stats}"
    assert stats.feature_bytes
    return count_faults(history.events)


@pytest.mark.parametrize("pipeline", daily(WAYS, 2))
async def test_no_fault_spoils_a_feature(pipeline: Pipeline) -> None:
    found = await asyncio.gather(*(schedule(seed, pipeline) for seed in range(6)))
    assert len(sum(found, Counter())) >= 2
