"""Workers whose pages are wrong, though whole: one is computed here too, and what came from them is not kept."""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from typing import Any

import numpy as np
import pytest

from tandem.clients.prefill_client import _REST_LONGEST
from tandem.engine.engine import Engine
from tandem.engine.sequences import TargetSequence
from tandem.runners.pages import PAGE
from tandem.speculation.types import Request
from tandem.v1 import prefill_worker_pb2 as pb
from tests.engine.test_prefix_cache import said, truth
from tests.services.prefill_sites import Counting, Worker, asking_engine, prefill_site
from tests.services.test_prefill import PROMPT, WHOLE, counted, fallbacks
from tests.services.test_prefill_faults import changed
from tests.support import run, toy

PAGES = WHOLE // PAGE


def lies_in(*numbers: int) -> Any:
    """Answers with pages of other tokens in place of those numbers, and with the right checksums."""

    def change(reply: pb.PrefillResponse, n: int) -> pb.PrefillResponse:
        if reply.WhichOneof("event") == "pages" and reply.pages.first_page in numbers:
            data = bytearray(reply.pages.data)
            data[: 8 * PAGE] = np.full(PAGE, 7, dtype=np.int64).tobytes()
            reply.pages.data, reply.pages.checksums[:] = bytes(data), [zlib.crc32(data)]
        return reply

    return changed(change)


def compares(engine: Engine, number: int) -> None:
    """The engine compares page `number` of a prompt, whose pages come one by one."""
    assert engine.remote_prefill
    engine.remote_prefill.chance = lambda count: 0 if count <= number + 1 else count - 1


def pages_kept(engine: Engine, prompt: list[int]) -> int:
    assert engine.prefixes
    return len(engine.prefixes.tree.match(engine.prefixes.scope(0), prompt))


def test_a_worker_whose_pages_are_wrong_is_found_at_its_first_prompt_and_nothing_of_it_is_used() -> None:
    async def test() -> None:
        async with prefill_site() as worker, asking_engine(worker.address) as engine:
            worker.faults.answer = lies_in(*range(PAGES))
            assert (await said(engine, PROMPT))[0] == truth(PROMPT)
            assert fallbacks(engine) == {"wrong": 1} and counted(engine).pages == PAGES
            assert engine.runner.processed == len(PROMPT) - 1 + PAGE
            (endpoint,) = engine.remote_prefill.source.endpoints  # type: ignore[union-attr]
            assert endpoint.rests_until - endpoint.clock() > _REST_LONGEST / 2
            assert await said(engine, PROMPT) == (truth(PROMPT), WHOLE), "what is kept is its own"
            assert worker.faults.asked == 1

    run(test())


def test_every_page_may_be_the_one_that_is_compared() -> None:
    async def test() -> None:
        async with prefill_site() as worker, asking_engine(worker.address, shares="off") as engine:
            for number in range(PAGES):
                worker.faults.answer = lies_in(number)
                compares(engine, number)
                engine.remote_prefill.source.endpoints[0].rests_until = 0.0  # type: ignore[union-attr]
                assert (await said(engine, PROMPT))[0] == truth(PROMPT)
                assert fallbacks(engine) == {"wrong": number + 1}

    run(test())


def test_pages_of_a_worker_that_is_found_wrong_later_are_forgotten_and_so_is_what_follows_from_them() -> None:
    """A sequence that copied such pages leaves them where nobody finds them."""
    other = [1, *PROMPT]

    async def test() -> None:
        async with prefill_site() as worker, asking_engine(worker.address) as engine:
            worker.faults.answer = lies_in(1)
            compares(engine, 0)
            assert (await said(engine, PROMPT))[0] != truth(PROMPT), "one wrong page of many may be missed"
            assert pages_kept(engine, PROMPT) >= PAGES
            slot = await engine.slots.acquire()
            late = TargetSequence(engine, slot, Request())
            await late.fill(PROMPT)
            compares(engine, 1)
            assert (await said(engine, other))[0] == truth(other)
            assert fallbacks(engine) == {"wrong": 1}
            late.release()
            await engine.batcher.on_device(int)
            assert not pages_kept(engine, PROMPT)
            worker.faults.answer = None
            assert (await said(engine, PROMPT))[0] == truth(PROMPT)

    run(test())


def test_pages_of_a_worker_that_another_process_has_replaced_are_forgotten() -> None:
    first, other = [1, *PROMPT], [2, *PROMPT]

    async def test() -> None:
        async with contextlib.AsyncExitStack() as engines, contextlib.AsyncExitStack() as site:
            bad = await site.enter_async_context(prefill_site())
            engine = await engines.enter_async_context(asking_engine(bad.address))
            bad.faults.answer = lies_in(1)
            compares(engine, 0)
            assert (await said(engine, PROMPT))[0] != truth(PROMPT)
            await said(engine, first)
            assert pages_kept(engine, PROMPT) >= PAGES, "the same process again: all is kept"
            await site.aclose()
            good = await site.enter_async_context(prefill_site(port=int(bad.address.rpartition(":")[2])))
            await until_it_answers(engine, good)
            assert not pages_kept(engine, PROMPT)
            assert (await said(engine, PROMPT))[0] == truth(PROMPT)

    async def until_it_answers(engine: Engine, good: Worker) -> None:
        assert engine.remote_prefill
        for n in range(200):
            engine.remote_prefill.source.endpoints[0].rests_until = 0.0  # type: ignore[attr-defined]
            await said(engine, [n, *other])
            if good.faults.asked:
                return
            await asyncio.sleep(0.05)

    run(test())


def test_more_pages_in_a_message_than_are_copied_at_once_cost_no_process() -> None:
    """A worker of another version may join more of them: B2 of the audit."""
    prompt = [byte % 250 for byte in range(90 * PAGE + 5)]
    joined: list[int] = []

    async def all_in_one(replies: Any, context: Any) -> Any:
        whole: pb.PrefillResponse | None = None
        async for reply in replies:
            if reply.WhichOneof("event") != "pages":
                if whole is not None:
                    joined.append(len(whole.pages.checksums))
                    yield whole
                yield reply
            elif whole is None:
                whole = reply
            else:
                whole.pages.data += reply.pages.data
                whole.pages.checksums.extend(reply.pages.checksums)

    async def test() -> None:
        big = [toy(slots=2, max_length=len(prompt) + 20, kind=Counting) for _ in range(2)]
        async with prefill_site(big[0]) as worker, asking_engine(worker.address, big[1]) as engine:
            worker.faults.answer = all_in_one
            assert (await said(engine, prompt))[0] == truth(prompt)
            assert joined[0] == counted(engine).pages == 90 > engine.remote_prefill.copies.together  # type: ignore[union-attr]
            assert not fallbacks(engine) and not engine.lost.is_set()
            assert engine.runner.processed == 4 + PAGE, "its end, and the page that is compared"

    run(test())


@pytest.mark.parametrize("number", [-1, 2**32, -(2**63), 2**63 - 1])
def test_pages_of_numbers_that_are_no_tokens_fail_their_row_and_no_toy(number: int) -> None:
    """A10: a toy target died of them. What is compared is another page, so that they are used."""

    def nonsense(reply: pb.PrefillResponse, n: int) -> pb.PrefillResponse:
        if n == 3:
            data = np.full(PAGE, number, dtype=np.int64).tobytes() + reply.pages.data[8 * PAGE :]
            reply.pages.data, reply.pages.checksums[:] = data, [zlib.crc32(data)]
        return reply

    async def test() -> None:
        async with prefill_site() as worker, asking_engine(worker.address) as engine:
            worker.faults.answer = changed(nonsense)
            compares(engine, 0)
            assert (await said(engine, PROMPT))[0] == truth(PROMPT)
            assert not engine.lost.is_set()

    run(test())
