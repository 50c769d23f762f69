"""Policies on links that change under them: whatever the link does, nothing is lost and the tokens are the target's."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from tandem.comparison.links.link import DelayLink
from tandem.comparison.links.link_settings import LinkSettings
from tandem.engine.generator import Generator
from tandem.speculation.types import SamplingParams
from tandem.speculation.verification_mode import Pipeline
from tests.support import GREEDY, SAMPLED, answer, distributed, ids, oracle, remote_draft, target_site, toy, until
from tests.support import worker_site as worker
from tests.toy import ToyConfig

pytestmark = pytest.mark.thorough

PROMPTS = (b"the first prompt", b"another one", b"and a third that is longer than both of them")
TOKENS = 90
STEP = ToyConfig(step_seconds=0.004)
DRAFT = "miss=0.3"
LEASE = 6.0  # seconds, above an outage
Hostile = Callable[[DelayLink, Path], Awaitable[None]]


async def outages(link: DelayLink, folder: Path) -> None:
    """A second of 12 Mbit/s, then two seconds of nothing, again and again."""
    file = folder / "outages"
    file.write_text("".join(f"{each}\n" for each in [*range(1, 1001), 3000]))
    await link.set(LinkSettings(20.0, trace_up=str(file), trace_down=str(file)))


async def jittery(link: DelayLink, folder: Path) -> None:
    await link.set(LinkSettings(30.0, jitter_ms=30.0))


@contextlib.asynccontextmanager
async def on_a_link(hostile: Hostile, folder: Path) -> AsyncIterator[DelayLink]:
    """A link that is hostile while the block runs."""
    async with DelayLink() as link:
        await link.set(LinkSettings(10.0))
        changing = asyncio.ensure_future(hostile(link, folder))
        try:
            yield link
        finally:
            changing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await changing


async def all_tokens_are_the_targets(generator: Generator, sampling: SamplingParams) -> None:
    """Asks all prompts at once, twice, so that policies learn from the first time."""
    for _ in range(2):
        asked = [answer(generator.generate, ids(prompt, TOKENS, sampling=sampling)) for prompt in PROMPTS]
        for prompt, got in zip(PROMPTS, await asyncio.gather(*asked), strict=True):
            assert got.token_ids == oracle(list(prompt), sampling, TOKENS)
            assert got.completion.output_tokens == len(got.token_ids)


@pytest.mark.parametrize("pipeline", list(Pipeline))
@pytest.mark.parametrize("hostile", [outages, jittery])
async def test_a_remote_target_on_a_hostile_link(hostile: Hostile, pipeline: Pipeline, tmp_path: Path) -> None:
    async with target_site(toy(config=STEP), LEASE) as site, on_a_link(hostile, tmp_path) as link:
        across = await link.listen(site.address)
        async with distributed(across, DRAFT, pipeline=pipeline, k=None) as (generator, _):
            await all_tokens_are_the_targets(generator, SAMPLED if pipeline is Pipeline.ON else GREEDY)
        await until(lambda: site.free == 4)  # an outage may swallow a close: then the lease ends the session


@pytest.mark.parametrize("pipeline", [Pipeline.OFF, Pipeline.NEVER_WAITING, Pipeline.AUTO])
@pytest.mark.parametrize("hostile", [outages, jittery])
async def test_a_remote_draft_on_a_hostile_link(hostile: Hostile, pipeline: Pipeline, tmp_path: Path) -> None:
    async with worker(None, DRAFT) as site, on_a_link(hostile, tmp_path) as link:
        across = await link.listen(site.address, back=True)
        async with remote_draft(across, toy(config=STEP), k=None, pipeline=pipeline) as (generator, _):
            await all_tokens_are_the_targets(generator, GREEDY)
