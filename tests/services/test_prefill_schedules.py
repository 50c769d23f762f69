"""Schedules of faults, cancellations and prompts at once, by seed: every answer is the target's own, and nothing stays.

Prompts begin with each other's, and the target keeps six pages, so that what arrived is replaced all the time.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import grpc
import pytest

from tandem.engine.engine import Engine
from tandem.engine.prefix_cache import PrefixCache
from tandem.engine.sequences import LocalVerifier
from tandem.rpc.request_context import set_prefix_scope
from tandem.runners.pages import PAGE
from tandem.speculation.types import Request, SamplingParams
from tandem.v1 import prefill_worker_pb2 as pb
from tests.daily import daily
from tests.services.prefill_sites import Counting, Worker, asking_engine, prefill_site, source_of, wake
from tests.support import GREEDY, HANG, SAMPLED, oracle, run, toy, until

PAGES, COUNT, REQUESTS = 6, 6, 14


def prompts(chance: random.Random) -> list[list[int]]:
    """Texts that begin with one another, of 40 to 110 tokens."""
    base = [chance.randrange(250) for _ in range(110)]
    cut = [base[: chance.randint(40, 110)] for _ in range(3)]
    return [*cut, [*base[: chance.randint(1, 4) * PAGE], *(chance.randrange(250) for _ in range(40))]]


def faulty(seed: int, worker: Worker) -> Any:
    """Answers some calls wrongly, late, or not to their end, as the seed says."""

    async def answer(replies: Any, context: Any) -> Any:
        chance = random.Random(f"{seed}/{worker.faults.asked}")
        kind = chance.choice(("none", "none", "none", "slow", "abort", "cut", "corrupt", "full", "broken"))
        at, n = chance.randint(0, 5), 0
        if kind == "full":
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
        async for reply in replies:
            if kind == "slow":
                await asyncio.sleep(chance.random() * 0.01)
            if n == at and kind == "abort":
                await context.abort(grpc.StatusCode.UNAVAILABLE, "lost")
            if n == at and kind == "broken":
                raise RuntimeError("a mistake of the worker")
            if n == at and kind == "cut":
                return
            if n == at and kind == "corrupt" and reply.pages.checksums:
                reply = pb.PrefillResponse(pages=reply.pages)
                reply.pages.checksums[0] ^= 1
            yield reply
            n += 1

    return answer


async def asked(engine: Engine, prompt: list[int], sampling: SamplingParams, scope: str) -> None:
    set_prefix_scope(scope, "")
    verifier, tokens = LocalVerifier(engine, Request(sampling)), list(prompt)
    try:
        await verifier.open(tokens)
        while len(tokens) < len(prompt) + COUNT:
            tokens += (await verifier.verify(tokens, ())).token_ids
    finally:
        await verifier.close()
    assert tuple(tokens[len(prompt) :]) == oracle(prompt, sampling, COUNT, past_the_end=True)


async def client(engine: Engine, texts: list[list[int]], seed: str) -> int:
    """Asks, sometimes leaves; returns how many answers were compared."""
    chance, compared = random.Random(seed), 0
    for _ in range(REQUESTS // 2):
        sampling, scope = chance.choice((GREEDY, SAMPLED)), chance.choice(("", "alice"))
        task = asyncio.create_task(asked(engine, chance.choice(texts), sampling, scope))
        if chance.random() < 0.3:
            await asyncio.sleep(chance.random() * 0.02)
            task.cancel()
        done = await asyncio.gather(task, return_exceptions=True)
        if done != [None]:
            assert isinstance(done[0], asyncio.CancelledError), repr(done[0])
        compared += done == [None]
    return compared


async def schedule(seed: int) -> int:
    chance = random.Random(seed)
    async with (
        prefill_site(toy(slots=2, chunk=32, kind=Counting)) as one,
        prefill_site(toy(slots=3, kind=Counting)) as other,
        asking_engine(f"{one.address},{other.address}", toy(slots=4, kind=Counting)) as engine,
    ):
        engine.prefixes = PrefixCache(
            engine.runner, engine.runner.page_store(PAGES), PAGES, engine.prefixes.scope_of if engine.prefixes else dict
        )
        for worker in (one, other):
            worker.faults.answer = faulty(seed, worker)
        for endpoint in source_of(engine).endpoints:
            endpoint.clock = lambda: 0.0
        wake(engine)
        texts = prompts(chance)
        resting = asyncio.create_task(awake(engine))
        clients = (client(engine, texts, f"{seed}/{n}") for n in range(4))
        compared = sum(await asyncio.wait_for(asyncio.gather(*clients), HANG))
        resting.cancel()
        await until(lambda: engine.slots.free == engine.slots.count)
        for worker in (one, other):
            await until(lambda worker=worker: worker.engine.slots.free == worker.engine.slots.count)  # type: ignore[misc]
            await until(lambda worker=worker: worker.lifecycle.running == 0)  # type: ignore[misc]
        await engine.batcher.on_device(int)
        tree = engine.prefixes.tree
        assert len(tree) <= PAGES
        assert engine.remote_prefill and engine.remote_prefill.pages and engine.batcher._away == 0
        return compared


async def awake(engine: Engine) -> None:
    """No worker rests for long, so that the faults go on."""
    while True:
        wake(engine)
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("seed", daily(range(6), 0, 1))
def test_under_a_schedule_of_faults_every_answer_is_the_targets_own(seed: int) -> None:
    assert run(schedule(seed)) > REQUESTS


@pytest.mark.thorough
@pytest.mark.parametrize("first", range(100, 400, 30))
def test_under_many_schedules_of_faults_every_answer_is_the_targets_own(first: int) -> None:
    for seed in range(first, first + 30):
        run(schedule(seed))
