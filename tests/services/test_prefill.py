"""Prompts that a PrefillWorker computes: what it saves, whose pages they are, and every way in which it may fail."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import zlib
from typing import Any

import grpc
import numpy as np
import pytest

from tandem.clients.prefill_client import PrefillConfig, layout_to_wire
from tandem.engine.engine import Engine
from tandem.engine.prefill import MOST_PAGES, PageLayout
from tandem.engine.prefix_cache import PrefixSharing, PrefixTree, share_prefixes
from tandem.engine.sequences import LocalVerifier
from tandem.rpc.channel import open_channel
from tandem.rpc.request_context import prefix_scope
from tandem.runners.capabilities import PAGE, Capabilities, Trait
from tandem.speculation.types import Request, SamplingParams
from tandem.v1 import prefill_worker_pb2 as pb
from tandem.v1.prefill_worker_pb2_grpc import PrefillWorkerStub
from tests.engine.test_prefix_cache import said, truth
from tests.services.prefill_sites import Counting, Worker, asking_engine, asks, prefill_site, source_of, wake
from tests.services.test_adapters import NAMES
from tests.services.test_identity import ByToken
from tests.support import (
    GREEDY,
    HANG,
    SAMPLED,
    opening,
    oracle,
    raw_stub,
    refusal,
    target_site,
    toy,
    until,
    with_adapters,
)
from tests.toy import ToyConfig

PROMPT = list(b"these are more than four pages of a prompt, which somebody else may well compute ..and its end")
WHOLE = (len(PROMPT) - 1) // PAGE * PAGE
REST = len(PROMPT) - 1 - WHOLE
both_samplings = pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])


def counted(engine: Engine) -> Any:
    assert engine.remote_prefill
    return engine.remote_prefill


def fallbacks(engine: Engine) -> dict[str, int]:
    assert engine.remote_prefill
    return {reason: count for reason, count in engine.remote_prefill.fallbacks.items() if count}


@both_samplings
@pytest.mark.parametrize("shares", ["identity", "off"])
async def test_a_long_prompt_is_computed_elsewhere_and_only_its_end_here(sampling: SamplingParams, shares: str) -> None:
    async with prefill_site() as worker, asking_engine(worker.address, shares=shares) as engine:
        assert await said(engine, PROMPT, sampling, 24) == (truth(PROMPT, sampling, 24), 0)
        assert engine.runner.processed == REST + PAGE, "its end, and the page that is compared"
        assert worker.runner.processed == WHOLE
        assert counted(engine).pages == WHOLE // PAGE and fallbacks(engine) == {}
        assert counted(engine).bytes == WHOLE // PAGE * engine.runner.page_bytes
        short = PROMPT[-20:]
        assert await said(engine, short, sampling) == (truth(short, sampling), 0)
        assert worker.faults.asked == 1, "a short prompt is processed in place"
        await until(lambda: worker.engine.slots.free == worker.engine.slots.count)
        assert engine.slots.free == engine.slots.count


async def test_adapters_have_pages_of_their_own_and_one_that_differs_there_is_processed_here() -> None:
    async with prefill_site() as worker, asking_engine(worker.address) as engine:
        await with_adapters(worker.engine)
        await with_adapters(engine)
        for name in NAMES:
            verifier, tokens = LocalVerifier(engine, Request(GREEDY, adapter=name)), list(PROMPT)
            await verifier.open(tokens)
            while len(tokens) < len(PROMPT) + 8:
                tokens += (await verifier.verify(tokens, ())).token_ids
            await verifier.close()
            expected = oracle(PROMPT, GREEDY, 8, past_the_end=True, adapter=name)
            assert tuple(tokens[len(PROMPT) :]) == expected
        assert counted(engine).pages == len(NAMES) * WHOLE // PAGE and not fallbacks(engine)
        worker.engine.adapters.revisions["red"] = "another"
        assert engine.prefixes
        engine.prefixes.tree = PrefixTree(engine.prefixes.tree.count)  # it finds nothing any more
        verifier = LocalVerifier(engine, Request(GREEDY, adapter="red"))
        await verifier.open(PROMPT)
        reply = await verifier.verify(PROMPT, ())
        await verifier.close()
        assert reply.token_ids == oracle(PROMPT, GREEDY, 1, past_the_end=True, adapter="red")
        assert fallbacks(engine) == {"refused": 1}
        assert worker.engine.adapters.running == []


# --- others go on meanwhile ---


async def test_a_request_that_is_cancelled_ends_the_work_there_too() -> None:
    async with prefill_site() as worker, asking_engine(worker.address) as engine:

        async def held(replies: Any, context: Any) -> Any:
            for _ in range(2):
                yield await anext(replies)
            await asyncio.Event().wait()

        worker.faults.answer = held
        task = asyncio.create_task(said(engine, PROMPT))
        await until(lambda: counted(engine).pages == 2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: worker.engine.slots.free == worker.engine.slots.count)
        worker.faults.answer = None
        assert engine.remote_prefill
        assert engine.slots.free == engine.slots.count
        assert (await said(engine, PROMPT))[0] == truth(PROMPT)


# --- who may ask, and for what ---


async def test_a_prefix_stays_in_the_scope_of_its_caller_there_and_here(tmp_path: Any) -> None:
    callers = ByToken(tmp_path)
    async with (
        prefill_site() as worker,
        target_site(toy(kind=Counting), security=callers.security) as site,
        raw_stub(site.address, credentials=callers.credentials("alice")) as alice,
        raw_stub(site.address, credentials=callers.credentials("bob")) as bob,
    ):
        assert site.engine
        elsewhere = await asks(site.engine, worker.address)
        await share_prefixes([worker.engine], PrefixSharing("identity", 1), prefix_scope)
        for number, stub in enumerate((alice, bob, alice)):
            opened = await stub.OpenSession(opening(str(number), PROMPT))
            assert opened.reused_length == (WHOLE if number == 2 else 0)
        assert len(set(worker.faults.scopes)) == worker.faults.asked == 2 and "" not in worker.faults.scopes
        assert worker.runner.processed == 2 * WHOLE, "bob's was not found among alice's"
        await elsewhere.close()


def asked(own: PageLayout, **fields: Any) -> pb.PrefillRequest:
    return pb.PrefillRequest(**({"token_ids": PROMPT[:WHOLE], "layout": layout_to_wire(own)} | fields))


@pytest.mark.parametrize(
    ("fields", "code", "said"),
    [
        ({"token_ids": PROMPT[:17]}, "INVALID_ARGUMENT", "token_ids: 17 tokens do not fill pages of 16"),
        ({"token_ids": []}, "INVALID_ARGUMENT", "token_ids: 0 tokens do not fill"),
        ({"token_ids": [999] * 16}, "INVALID_ARGUMENT", "token id 999 is outside the vocabulary"),
        ({"token_ids": [1] * 176}, "OUT_OF_RANGE", "176 tokens and the sequence length is 160"),
        ({"first_page": WHOLE // PAGE}, "INVALID_ARGUMENT", "first_page"),
        ({"layout": pb.PageLayout()}, "FAILED_PRECONDITION", "layout"),
        ({"adapter": "green"}, "INVALID_ARGUMENT", "adapter: 'green' is not one of"),
        ({"adapter_revision": "x"}, "INVALID_ARGUMENT", "adapter_revision"),
        ({"adapter": "\n"}, "INVALID_ARGUMENT", "adapter"),
    ],
)
async def test_a_bad_field_is_named_before_anything_is_computed(fields: Any, code: str, said: str) -> None:
    async with prefill_site() as worker, open_channel(worker.address) as channel:
        call = PrefillWorkerStub(channel).Prefill(asked(worker.pages.layout, **fields))
        found = await refusal(call)
        assert found.code == code and said in found.message
        assert worker.runner.processed == 0 and worker.engine.slots.free == worker.engine.slots.count


async def test_a_worker_that_drains_refuses_new_prompts_and_finishes_those_it_has() -> None:
    async with prefill_site() as worker, asking_engine(worker.address) as engine:
        release = asyncio.Event()

        async def held(replies: Any, context: Any) -> Any:
            async for reply in replies:
                yield reply
                await release.wait()

        worker.faults.answer = held
        first = asyncio.create_task(said(engine, PROMPT))
        await until(lambda: worker.lifecycle.running == 1)
        worker.lifecycle.accepting, worker.faults.answer = False, None
        other = [1, *PROMPT]
        assert (await said(engine, other))[0] == truth(other)
        release.set()
        assert (await first)[0] == truth(PROMPT)
        assert fallbacks(engine) == {"unavailable": 1} and counted(engine).pages == WHOLE // PAGE


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("here", 32, 1.0), "prefill: 'here' is not HOST:PORT"),
        (("a:1,a:1", 32, 1.0), "prefill: 'a:1,a:1' names a server twice"),
        (("a:1", 15, 1.0), "prefill_min_tokens: 15 is below 16, a page"),
        (("a:1", 32, 0.0), r"prefill_timeout_s: 0.0 is not above 0"),
    ],
)
def test_a_bad_flag_is_named(given: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        PrefillConfig(*given)


async def test_a_model_whose_pages_cannot_be_copied_is_refused_in_one_line() -> None:
    class Unable(Counting):
        @property
        def capabilities(self) -> Capabilities:
            return dataclasses.replace(super().capabilities, traits=frozenset({Trait.GRAPHS}))

    async with contextlib.AsyncExitStack() as stack:
        with pytest.raises(
            ValueError, match="prefill: toy copies no keys and values out of its slots: no graph copies pages"
        ):
            await stack.enter_async_context(prefill_site(toy(kind=Unable)))


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
    async with prefill_site(toy(ToyConfig(salt=1), kind=Counting)) as worker, asking_engine(worker.address) as engine:
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
