"""What goes wrong at a PrefillWorker, or on the way: the rest is processed in place, and the tokens are the same."""

from __future__ import annotations

import asyncio
import zlib
from typing import Any

import grpc
import numpy as np
import pytest

from tandem.engine.engine import Engine
from tandem.engine.prefill import MOST_PAGES
from tandem.runners.capabilities import PAGE
from tandem.speculation.types import SamplingParams
from tandem.v1 import prefill_worker_pb2 as pb
from tests.engine.test_prefix_cache import said, truth
from tests.services.prefill_sites import Counting, Worker, asking_engine, prefill_site, source_of, wake
from tests.services.test_prefill import PROMPT, WHOLE, both_samplings, counted, fallbacks
from tests.support import HANG, toy, until
from tests.toy import ToyConfig


def changed(change: Any) -> Any:
    """Answers with `change(reply, n)` in place of the n-th reply."""

    async def answering(replies: Any, context: Any) -> Any:
        n = 0
        async for reply in replies:
            yield change(reply, n)
            n += 1

    return answering


def flipped(reply: pb.PrefillResponse, n: int) -> pb.PrefillResponse:
    if n == 1:
        data = bytearray(reply.pages.data)
        data[5] ^= 1
        reply.pages.data = bytes(data)
    return reply


def shifted(reply: pb.PrefillResponse, n: int) -> pb.PrefillResponse:
    if n == 1:
        reply.pages.first_page += 1
    return reply


def truncated(reply: pb.PrefillResponse, n: int) -> pb.PrefillResponse:
    if n == 1:
        reply.pages.data = reply.pages.data[:-1]
    return reply


def too_many(reply: pb.PrefillResponse, n: int) -> pb.PrefillResponse:
    if n == 4:
        reply.pages.data += reply.pages.data
        reply.pages.checksums.extend(reply.pages.checksums)
    return reply


async def cut_off(replies: Any, context: Any) -> Any:
    for _ in range(2):
        yield await anext(replies)


async def crashed(replies: Any, context: Any) -> Any:
    for _ in range(2):
        yield await anext(replies)
    await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")


async def broken(replies: Any, context: Any) -> Any:
    raise RuntimeError("a mistake of the worker")
    yield


async def silent(replies: Any, context: Any) -> Any:
    for _ in range(2):
        yield await anext(replies)
    await asyncio.sleep(HANG)


FAULTS = [
    (changed(flipped), "corrupt", 1),
    (changed(shifted), "corrupt", 1),
    (changed(truncated), "corrupt", 1),
    (changed(too_many), "corrupt", 4),
    (cut_off, "cut", 2),
    (crashed, "unavailable", 2),
    (broken, "failed", 0),
    (silent, "late", 2),
]


@both_samplings
@pytest.mark.parametrize(("fault", "reason", "pages"), FAULTS, ids=lambda value: getattr(value, "__name__", str(value)))
async def test_whatever_goes_wrong_there_the_rest_is_processed_here(
    fault: Any, reason: str, pages: int, sampling: SamplingParams
) -> None:
    seconds = 0.3 if reason == "late" else 30.0
    async with prefill_site() as worker, asking_engine(worker.address, seconds=seconds) as engine:
        worker.faults.answer = fault
        assert await said(engine, PROMPT, sampling, 24) == (truth(PROMPT, sampling, 24), 0)
        assert fallbacks(engine) == {reason: 1}
        if reason == "late":  # a busy machine may send its first pages too late too
            assert counted(engine).pages <= pages
            pages = counted(engine).pages
        assert counted(engine).pages == pages
        assert source_of(engine).endpoints[0].rests_until
        compared = PAGE if pages else 0
        assert engine.runner.processed == len(PROMPT) - 1 - pages * PAGE + compared
        assert await said(engine, PROMPT, sampling, 24) == (truth(PROMPT, sampling, 24), WHOLE)
        assert engine.slots.free == engine.slots.count
        await until(lambda: worker.engine.slots.free == worker.engine.slots.count)


async def test_a_worker_that_is_not_there_rests_and_is_found_once_it_is() -> None:
    async def until_asked(engine: Engine, back: Worker) -> None:
        """The channel needs a moment to connect again."""
        n = 100
        while not back.faults.asked:
            wake(engine)
            n += 1
            assert (await said(engine, [n, *PROMPT]))[0] == truth([n, *PROMPT])

    async with prefill_site() as gone:
        address = gone.address
    async with asking_engine(address) as engine:
        for n in range(3):
            other = [n, *PROMPT]
            assert (await said(engine, other))[0] == truth(other)
        assert fallbacks(engine) == {"unavailable": 3}
        (endpoint,) = source_of(engine).endpoints
        assert endpoint.rests_until
        async with prefill_site(port=int(address.rpartition(":")[2])) as back:
            await until_asked(engine, back)
            assert (await said(engine, PROMPT))[0] == truth(PROMPT)
            assert back.faults.asked


async def test_a_worker_of_another_model_is_refused_before_it_computes_anything() -> None:
    async with (
        prefill_site(toy(ToyConfig(salt=1), kind=Counting)) as worker,
        asking_engine(worker.address) as engine,
    ):
        assert (await said(engine, PROMPT))[0] == truth(PROMPT)
        assert fallbacks(engine) == {"mismatch": 1} and worker.runner.processed == 0


async def test_a_worker_whose_pages_are_wrong_is_found_at_its_first_prompt_and_nothing_of_it_is_used() -> None:
    def lie(reply: pb.PrefillResponse, n: int) -> pb.PrefillResponse:
        """Pages of other tokens, with the right checksums."""
        data = bytearray(reply.pages.data)
        data[: 8 * PAGE] = np.full(PAGE, 7, dtype=np.int64).tobytes()
        reply.pages.data, reply.pages.checksums[:] = bytes(data), [zlib.crc32(data)]
        return reply

    async with prefill_site() as worker, asking_engine(worker.address) as engine:
        worker.faults.answer = changed(lie)
        assert (await said(engine, PROMPT))[0] == truth(PROMPT)
        assert fallbacks(engine) == {"wrong": 1} and counted(engine).pages == 1
        assert engine.runner.processed == len(PROMPT) - 1 + PAGE
        assert source_of(engine).endpoints[0].rests_until
        assert await said(engine, PROMPT) == (truth(PROMPT), WHOLE), "what is kept is its own"
        assert worker.faults.asked == 1


async def test_more_pages_in_a_message_than_are_copied_at_once_cost_no_process() -> None:
    prompt = [byte % 250 for byte in range(90 * PAGE + 5)]

    async def all_in_one(replies: Any, context: Any) -> Any:
        whole = await anext(replies)
        async for reply in replies:
            whole.pages.data += reply.pages.data
            whole.pages.checksums.extend(reply.pages.checksums)
        assert len(whole.pages.checksums) == 90 > MOST_PAGES
        yield whole

    big = [toy(slots=2, max_length=len(prompt) + 20, kind=Counting) for _ in range(2)]
    async with prefill_site(big[0]) as worker, asking_engine(worker.address, big[1]) as engine:
        worker.faults.answer = all_in_one
        assert (await said(engine, prompt))[0] == truth(prompt)
        assert counted(engine).pages == 90 and not fallbacks(engine) and not engine.lost.is_set()
        assert engine.runner.processed == 4 + PAGE, "its end, and the page that is compared"
