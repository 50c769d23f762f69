"""Requests run side by side, share steps, and leave when their reader does (G6, G7)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from tests.gate import Gate
from tests.support import (
    GREEDY,
    Site,
    answer,
    fused_site,
    ids,
    oracle,
    run,
    target_site,
    toy,
    until,
    worker_site,
)
from tests.toy import ToyConfig

STEP = 0.02
SERVICES = ("autoregressive", "fused", "draft_worker")
LONG = ids(b"a long one", 120, ignore_end_of_sequence=True)


@contextlib.asynccontextmanager
async def serving(
    architecture: str, slots: int = 4, step: float = STEP, chunk: int = 16, gate: Gate | None = None
) -> AsyncIterator[list[Site]]:
    """The site to ask, then the sites behind it. `gate`: which the target's steps pass."""
    target = toy(ToyConfig(step_seconds=step), slots, chunk=chunk)
    if gate:
        gate.guards(target)
    async with contextlib.AsyncExitStack() as stack:
        if architecture == "fused":
            sites = [await stack.enter_async_context(fused_site(target, toy(slots=slots, chunk=chunk)))]
        else:
            sites = [await stack.enter_async_context(target_site(target))]
        if architecture == "draft_worker":
            worker = worker_site(sites[0].address, "miss=0.5", slots)
            sites.insert(0, await stack.enter_async_context(worker))
        with gate or contextlib.nullcontext():  # open at the end: a step that stands would hold up the close
            yield sites


def all_free(sites: list[Site], slots: int) -> bool:
    sessions = sum(len(site.verifier.sessions) for site in sites if site.verifier)
    return sessions == 0 and all(site.free == slots for site in sites)


@pytest.mark.parametrize("architecture", SERVICES)
def test_a_second_request_does_not_wait_for_the_first_to_finish(architecture: str) -> None:
    async def test() -> None:
        async with serving(architecture, step=0.004) as sites, sites[0].client() as client:
            first = asyncio.create_task(answer(client.generate, LONG))
            await until(lambda: sites[0].free < 4)
            second = await answer(client.generate, ids(b"short", 5))
            assert second.token_ids == oracle(b"short", GREEDY, 5)
            assert not first.done()
            assert second.finished < (await first).finished
            assert first.result().token_ids == oracle(b"a long one", GREEDY, 120, past_the_end=True)

    run(test())


@pytest.mark.parametrize("architecture", SERVICES)
def test_concurrent_requests_share_steps(architecture: str) -> None:
    async def test() -> None:
        async with serving(architecture, step=0.012) as sites, sites[0].client() as client:
            await asyncio.gather(
                *(answer(client.generate, ids([65 + i], 20, ignore_end_of_sequence=True)) for i in range(4))
            )
            for site in sites:
                batcher = site.engine.batcher
                assert batcher.rows / batcher.steps > 1.2

    run(test())
