"""G6, G7 under load: bounded queues that say when to come back, deadlines that reach the loop, readers that do not."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tandem import AsyncClient
from tandem.rpc.received_errors import TandemError
from tandem.services.statuses import MAX_PARTIAL, Interrupted, QueueFull, to_status
from tandem.v1 import generation_pb2
from tests.gate import Gate
from tests.support import GREEDY, HANG, Site, answer, fused_site, ids, oracle, target_site, toy, until, worker_site
from tests.toy import ToyConfig, ToyText, ToyTokenizer

SERVICES = ("autoregressive", "fused", "draft_worker")
LONG = ids(b"a long one", 120, ignore_end_of_sequence=True)


@contextlib.asynccontextmanager
async def serving(architecture: str, gate: Gate) -> AsyncIterator[list[Site]]:
    """The site to ask, then the sites behind it, of one slot each; the target's steps pass the gate."""
    target = gate.guards(toy(ToyConfig(step_seconds=0.002), 1))
    async with contextlib.AsyncExitStack() as stack:
        if architecture == "fused":
            sites = [await stack.enter_async_context(fused_site(target, toy(slots=1)))]
        else:
            sites = [await stack.enter_async_context(target_site(target))]
        if architecture == "draft_worker":
            worker = worker_site(sites[0].address, "miss=0.5", 1)
            sites.insert(0, await stack.enter_async_context(worker))
        with gate:  # open at the end: a step that stands would hold up the close
            yield sites


def all_free(sites: list[Site]) -> bool:
    sessions = sum(len(site.verifier.sessions) for site in sites if site.verifier)
    return sessions == 0 and all(site.free == 1 for site in sites)


@pytest.mark.parametrize("architecture", SERVICES)
async def test_a_full_queue_refuses_with_a_delay_and_a_client_that_is_told_so_comes_back(architecture: str) -> None:
    """G6: RESOURCE_EXHAUSTED with RetryInfo; nobody who was let in is refused."""
    gate = Gate()
    async with serving(architecture, gate) as sites, sites[0].client() as client:
        assert sites[0].method
        sites[0].method.queue = 2
        gate.close()
        first = [asyncio.create_task(answer(client.generate, ids([65 + i], 12))) for i in range(3)]
        await until(lambda: sites[0].lifecycle.running == 3)
        with pytest.raises(TandemError, match="3 requests are under way: 1 slots and a queue of 2") as caught:
            await answer(client.generate, ids(b"x", 3))
        refused = caught.value
        assert (refused.code, refused.reason) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL")
        assert refused.retry_seconds == pytest.approx(0.1)
        gate.open()
        async with AsyncClient(sites[0].address, retry_seconds=HANG) as patient:
            late = await patient.generate(list(b"x"), max_new_tokens=3)
        assert late.token_ids == oracle(b"x", GREEDY, 3)
        assert [a.token_ids for a in await asyncio.gather(*first)] == [oracle([65 + i], GREEDY, 12) for i in range(3)]


@pytest.mark.parametrize("architecture", SERVICES)
async def test_a_request_whose_deadline_passes_frees_its_slot_within_one_step(architecture: str) -> None:
    """G7: while it runs, and while it waits for a slot; the client keeps what it was sent."""
    gate = Gate()
    async with serving(architecture, gate) as sites, sites[0].client() as client:
        await answer(client.generate, ids(b"x", 3))
        began = time.monotonic()
        await answer(client.generate, ids(b"x", 3))
        seconds = max(0.3, 20 * (time.monotonic() - began))  # so that some tokens come in time, on any machine
        seen: list[Any] = []

        async def read() -> None:
            async for event in client.generate(LONG, timeout=seconds):
                seen.append(event)

        running = asyncio.create_task(read())
        await until(lambda: bool(seen))
        await gate.stands()
        waiting = asyncio.create_task(answer(lambda r: client.generate(r, timeout=0.2), LONG))
        for task in (waiting, running):
            with pytest.raises(TandemError) as caught:
                await task
            assert caught.value.code == "DEADLINE_EXCEEDED"
        truth = oracle(b"a long one", GREEDY, 120, past_the_end=True)
        assert caught.value.produced == truth[: len(caught.value.produced)] and caught.value.produced
        await gate.comes_true_within(2, lambda: all_free(sites))
        gate.open()
        assert (await answer(client.generate, ids(b"x", 3))).token_ids == oracle(b"x", GREEDY, 3)


class Wordy(ToyTokenizer):
    """A hundred kilobytes of text a token: no transport's window holds a whole answer."""

    def stream(self) -> Any:
        class Words(ToyText):
            def push(self, token: int) -> str:
                return "w" * 100_000

        return Words()


def test_a_status_carries_the_tokens_so_far_and_stays_small() -> None:
    status = to_status(Interrupted(QueueFull("full"), tuple(range(100_000, 105_000))))
    partial = generation_pb2.PartialGeneration()
    (found,) = [detail for detail in status.details if detail.Unpack(partial)]
    assert partial.output_tokens == 5000
    assert list(partial.token_ids) == list(range(105_000 - MAX_PARTIAL, 105_000))
    assert status.ByteSize() * 4 / 3 < 8000 and found
    handed_on = to_status(TandemError("RESOURCE_EXHAUSTED", "full", 0.25, "NO_SLOT"))
    assert len(handed_on.details) == 2
