"""The deployments of a combination, in this process: toy runners, or the real pair loaded once."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tandem.engine.model_config import ModelConfig
from tandem.receipts.keys import open_keys
from tandem.rpc.channel import DRAFT, FUSED, MESSAGES, TARGET
from tandem.runners.load_runner import Execution
from tandem.services.receipts import Receipts
from tandem.speculation.run_on import MAX_UNREAD
from tandem.speculation.types import SamplingParams
from tandem.speculation.verification_mode import Pipeline
from tests.conformance.bench import Bench, Combination, Inside
from tests.reliability.faults import FaultInterceptor
from tests.reliability.history import History
from tests.support import (
    HANG,
    LEASE,
    Site,
    distributed,
    draft_config,
    fused_site,
    oracle,
    raw_stub,
    target_site,
    toy,
    with_adapters,
    worker_site,
)
from tests.toy import ToyConfig

TOY_DRAFT = "salt=0,miss=0.3"
LONGEST = 2 * MAX_UNREAD + 16
PIPELINES = {"unary": Pipeline.OFF, "stream": Pipeline.ON, "run": Pipeline.NEVER_WAITING}
"""How clients of ours send rounds over each transport."""


def _runner(combination: Combination) -> tuple[Any, Any]:
    """The target's runner and its tokenizer."""
    if combination.runner == "toy":
        return toy(ToyConfig(step_seconds=0.001), max_length=LONGEST), None
    from tests.runners import real

    return real.target("bfloat16"), real.tokenizer()


def _draft(combination: Combination) -> ModelConfig:
    if combination.runner == "toy":
        return draft_config(TOY_DRAFT, 4, LONGEST)
    from tests.runners import real

    return ModelConfig(Execution("cpu", "bfloat16"), real.SHAPE)


async def _plain_toy(prompt: Sequence[int], sampling: SamplingParams, count: int, adapter: str = "") -> list[int]:
    return list(oracle(prompt, sampling, count, past_the_end=True, adapter=adapter))


@functools.cache
def _real_truth(prompt: tuple[int, ...], sampling: SamplingParams, count: int) -> tuple[int, ...]:
    from tests.runners import real

    return tuple(real.plain(real.target("bfloat16"), prompt, count, sampling)[0])


async def _plain_real(prompt: Sequence[int], sampling: SamplingParams, count: int) -> list[int]:
    """On the loaded target, without the server: called while it is idle, before a request needs slot 0."""
    return list(_real_truth(tuple(prompt), sampling, count))


@contextlib.asynccontextmanager
async def deployed(combination: Combination, lease_seconds: float = LEASE) -> AsyncIterator[Bench]:
    """Servers of this process. Of a fused server only the fused one; else a target, and what drafts for it."""
    async with contextlib.AsyncExitStack() as stack:
        if combination.architecture == "fused":
            yield await _fused(combination, stack)
        else:
            yield await _apart(combination, stack, lease_seconds)


async def _fused(combination: Combination, stack: contextlib.AsyncExitStack) -> Bench:
    target, tokenizer = _runner(combination)
    if combination.runner == "toy":
        site = await stack.enter_async_context(fused_site(target, toy(max_length=LONGEST)))
    else:
        from tests.runners import real

        site = await stack.enter_async_context(fused_site(target, real.draft("bfloat16"), tokenizer=tokenizer))
    return await _bench(combination, stack, None, site)


async def _apart(combination: Combination, stack: contextlib.AsyncExitStack, lease_seconds: float) -> Bench:
    runner, tokenizer = _runner(combination)
    faults = FaultInterceptor(None, History("target"))
    target = await stack.enter_async_context(target_site(runner, lease_seconds, [faults], tokenizer))
    pipeline = PIPELINES[combination.transport]
    config = _draft(combination)
    if combination.architecture == "draft_worker":
        front = await stack.enter_async_context(
            worker_site(target.address, config=config, pipeline=pipeline, reconnect_seconds=HANG)
        )
        bench = await _bench(combination, stack, target, front)
    else:
        bench = await _bench(combination, stack, target, None)
        loop = distributed(target.address, pipeline=pipeline, config=config, reconnect_seconds=HANG)
        generator, _ = await stack.enter_async_context(loop)
        bench.generate = generator.generate
        bench.info = replace(generator.info, receipt_key=bench.info.receipt_key)
        if combination.runner == "toy":
            featured = await stack.enter_async_context(target_site(toy(max_length=LONGEST), features=()))
            bench.featured = await stack.enter_async_context(raw_stub(featured.address, TARGET))
    bench.faults = faults
    return bench


async def _bench(
    combination: Combination, stack: contextlib.AsyncExitStack, target: Site | None, front: Site | None
) -> Bench:
    site = front or target
    assert site and site.generator
    client = await stack.enter_async_context(site.client())
    plain = _plain_toy if combination.runner == "toy" else _plain_real
    if combination.runner == "toy":
        await with_adapters((target or site).engine)
    info = site.generator.info
    if combination.transport == "stream":  # others sign nothing
        keys = open_keys(Path(stack.enter_context(tempfile.TemporaryDirectory())), 90)
        assert site.method
        site.method.receipts, info = Receipts(keys, site.service, dict), replace(info, receipt_key=keys.public)
    bench = Bench(combination, info, client.generate, plain, inside=Inside(target, front))
    message = getattr(MESSAGES[site.service], f"{site.service}GenerateRequest")
    bench.front = (await stack.enter_async_context(raw_stub(site.address, site.service)), message)
    if target:
        bench.stub = await stack.enter_async_context(raw_stub(target.address, TARGET))
    if site.service == DRAFT:
        bench.worker = await stack.enter_async_context(raw_stub(site.address, DRAFT))
    assert (site.service == FUSED) == (target is None)
    return bench
