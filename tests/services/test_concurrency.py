"""Requests run side by side, share steps, and leave when their reader does (G6, G7)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from tandem.rpc import wire
from tandem.rpc.channel import MESSAGES
from tandem.rpc.errors import TandemError
from tandem.rpc.generation_client import GenerationClient
from tandem.runners.toy import ToyConfig
from tandem.services.generation import GenerateMethod
from tandem.services.lifecycle import Lifecycle
from tandem.v1 import target_verifier_pb2 as pb
from tests.gate import Gate
from tests.support import (
    GREEDY,
    Site,
    answer,
    fused_site,
    ids,
    oracle,
    raw_stub,
    run,
    target_site,
    toy,
    until,
    worker_site,
)

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


@pytest.mark.parametrize("architecture", SERVICES)
def test_a_cancelled_stream_frees_its_slot_within_one_step(architecture: str) -> None:
    async def test() -> None:
        gate = Gate()
        async with serving(architecture, step=0.002, gate=gate) as sites, sites[0].client() as client:
            await test_in(gate, sites, client)

    async def test_in(gate: Gate, sites: list[Site], client: GenerationClient) -> None:
        stream = client.generate(LONG)
        await anext(stream)
        await gate.stands()
        assert not all_free(sites, 4)
        await stream.aclose()
        await gate.comes_true_within(2, lambda: all_free(sites, 4))
        gate.open()
        await until(lambda: sites[0].lifecycle.running == 0)  # the stream's own end comes after its slot's
        assert (await answer(client.generate, ids(b"x", 3))).token_ids == oracle(b"x", GREEDY, 3)

    run(test())


@pytest.mark.parametrize("architecture", SERVICES)
def test_a_request_cancelled_while_it_prefills_frees_its_slot(architecture: str) -> None:
    async def test() -> None:
        gate = Gate()
        async with serving(architecture, chunk=8, gate=gate) as sites, sites[0].client() as client:
            gate.close()
            task = asyncio.create_task(answer(client.generate, ids([65] * 100)))
            await until(lambda: gate.held > 0)
            assert not all_free(sites, 4)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await gate.comes_true_within(2, lambda: all_free(sites, 4))

    run(test())


@pytest.mark.parametrize("architecture", SERVICES)
def test_a_request_cancelled_while_it_waits_for_a_slot_takes_none(architecture: str) -> None:
    async def test() -> None:
        async with serving(architecture, slots=1, step=0.005) as sites, sites[0].client() as client:
            first = asyncio.create_task(answer(client.generate, ids(b"first", 40, ignore_end_of_sequence=True)))
            await until(lambda: sites[0].free == 0)
            second = asyncio.create_task(answer(client.generate, ids(b"second")))
            third = asyncio.create_task(answer(client.generate, ids(b"third", 5)))
            await until(lambda: sites[0].lifecycle.running == 3)
            second.cancel()
            assert (await first).token_ids == oracle(b"first", GREEDY, 40, past_the_end=True)
            assert (await third).token_ids == oracle(b"third", GREEDY, 5)
            await until(lambda: all_free(sites, 1))

    run(test())


@pytest.mark.parametrize("architecture", SERVICES)
def test_a_deadline_frees_the_slot_as_a_cancellation_does(architecture: str) -> None:
    async def test() -> None:
        async with serving(architecture) as sites, sites[0].client() as client:
            with pytest.raises(TandemError) as caught:
                async for _ in client.generate(LONG, timeout=0.15):
                    pass
            assert caught.value.code == "DEADLINE_EXCEEDED"
            await until(lambda: all_free(sites, 4))

    run(test())


@pytest.mark.parametrize("architecture", SERVICES)
def test_a_storm_of_cancellations_leaves_every_slot_free_and_the_next_output_exact(architecture: str) -> None:
    async def test() -> None:
        async with serving(architecture, slots=2, step=0.002, chunk=4) as sites, sites[0].client() as client:
            tasks = [asyncio.create_task(answer(client.generate, ids([65 + i] * 20, 60))) for i in range(12)]
            for i, task in enumerate(tasks):
                await asyncio.sleep(0.003 * (i % 4))
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await until(lambda: all_free(sites, 2))
            answers = await asyncio.gather(*(answer(client.generate, ids([97 + i] * 9, 12)) for i in range(3)))
            assert [a.token_ids for a in answers] == [oracle([97 + i] * 9, GREEDY, 12) for i in range(3)]

    run(test())


@pytest.mark.parametrize("architecture", SERVICES)
def test_a_reader_that_does_not_read_delays_nobody(architecture: str) -> None:
    async def test() -> None:
        async with serving(architecture, step=0.002) as sites, sites[0].client() as client:
            message = getattr(MESSAGES[sites[0].service], f"{sites[0].service}GenerateRequest")
            async with raw_stub(sites[0].address, sites[0].service) as service:
                silent = service.Generate(message(generation=wire.generation_to_wire(LONG)))
                await until(lambda: sites[0].free < 4)
                assert (await answer(client.generate, ids(b"x", 5))).token_ids == oracle(b"x", GREEDY, 5)
                await until(lambda: all_free(sites, 4))
                silent.cancel()

    run(test())


def test_a_generation_goes_on_and_frees_its_slot_while_nothing_is_read() -> None:
    """Also where the transport takes nothing more: only the first reply is ever asked for."""

    async def test() -> None:
        async with target_site() as site:
            method = GenerateMethod(site.generator, pb.TargetVerifierGenerateResponse, Lifecycle(), None)
            message = pb.TargetVerifierGenerateRequest(generation=wire.generation_to_wire(LONG))
            stream = method.stream(message)
            first = await anext(stream)
            await until(lambda: site.free == 4)
            rest = [reply async for reply in stream]
            tokens = [t for reply in (first, *rest) for t in reply.chunk.token_ids]
            assert tuple(tokens) == oracle(b"a long one", GREEDY, 120, past_the_end=True)

    run(test())
