"""VerifyStream over the wire: in order, stale without computation, bounded, and nothing left behind."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from tandem.services.duplex import MAX_AHEAD, answered_in_order
from tandem.v1 import target_verifier_pb2 as pb
from tests.services.test_target_verifier import PROMPT, opening, verifying
from tests.support import GREEDY, oracle, raw_stub, target_site, toy, until
from tests.toy import ToyConfig


async def status(call: Any) -> tuple[str, str]:
    with pytest.raises(grpc.RpcError) as caught:
        while (await call.read()) is not grpc.aio.EOF:
            pass
    return caught.value.code().name, caught.value.details()


@pytest.mark.parametrize(
    ("bad", "code", "says"),
    [
        (verifying(PROMPT, [1] * 6), "INVALID_ARGUMENT", "maximum speculation length 5"),
        (verifying(PROMPT, [258]), "INVALID_ARGUMENT", "draft_tokens: token id 258"),
        (verifying(PROMPT, name="another"), "NOT_FOUND", "no session another"),
        (verifying([*PROMPT, *[1] * 200]), "OUT_OF_RANGE", "above the sequence length"),
    ],
)
async def test_an_invalid_round_ends_the_stream_as_it_would_end_a_verify_and_harms_no_session(
    bad: Any, code: str, says: str
) -> None:
    truth = list(oracle(PROMPT, GREEDY, 6))
    async with target_site() as site, raw_stub(site.address) as target:
        await target.OpenSession(opening())
        call = target.VerifyStream()
        await call.write(verifying(PROMPT, truth[:1]))
        await call.write(bad)
        assert list((await call.read()).token_ids) == truth[:2]
        got, message = await status(call)
        assert (got, says in message) == (code, True), message
        assert list((await target.Verify(verifying(PROMPT + truth[:2]))).token_ids) == truth[2:3]
        with pytest.raises(grpc.RpcError) as caught:
            await target.Verify(bad)
        assert (caught.value.code().name, caught.value.details()) == (code, message)


async def test_a_stream_that_is_cancelled_or_half_closed_leaves_no_task_and_no_slot_taken() -> None:
    truth = list(oracle(PROMPT, GREEDY, 12))
    runner = toy(ToyConfig(step_seconds=0.02))
    async with target_site(runner) as site, raw_stub(site.address) as target:
        tasks = len(asyncio.all_tasks())
        for leave in ("cancel", "done_writing"):
            await target.OpenSession(opening(leave))
            call = target.VerifyStream()
            for n in (0, 3, 6):
                await call.write(verifying(PROMPT + truth[:n], truth[n : n + 2], leave))
            await call.read()
            if leave == "cancel":
                call.cancel()
            else:
                await call.done_writing()
                assert [len((await call.read()).token_ids) for _ in range(2)] == [3, 3]
                assert await call.read() is grpc.aio.EOF
            assert (await target.CloseSession(pb.CloseSessionRequest(session_id=leave))).closed
            await until(lambda: site.free == 4)
        await until(lambda: len(asyncio.all_tasks()) <= tasks)


async def test_reading_ahead_is_bounded_and_goes_on_while_a_round_is_verified() -> None:
    read: list[int] = []
    release = asyncio.Event()

    async def requests() -> AsyncIterator[int]:
        for i in range(100):
            read.append(i)
            yield i

    async def slow(request: int, arrived: float) -> int:
        await release.wait()
        return request

    replies = answered_in_order(requests(), slow, idle_seconds=60)
    first = asyncio.create_task(anext(replies))
    await until(lambda: len(read) >= MAX_AHEAD + 2)
    for _ in range(100):
        await asyncio.sleep(0)
    assert len(read) == MAX_AHEAD + 2  # one is verified, one waits for room
    release.set()
    assert await first == 0
    assert [reply async for reply in replies] == list(range(1, 100))
    reading = [t for t in asyncio.all_tasks() if t.get_name() == "read stream"]
    assert not reading


def objects() -> int:
    """Counts live objects except timers and their contexts, because asyncio keeps up to a hundred cancelled timers."""
    gc.collect()
    return sum(
        type(each).__name__ not in ("TimerHandle", "Context", "hamt", "hamt_bitmap_node") for each in gc.get_objects()
    )


async def test_streams_that_are_abandoned_leave_no_object_behind() -> None:
    """Counted: what stays resident after them is the allocator's, free for the next."""
    async with target_site() as site, raw_stub(site.address) as target:
        await target.OpenSession(opening())
        tasks, counted = len(asyncio.all_tasks()), list[int]()
        for _ in range(4):
            calls = [target.VerifyStream() for _ in range(100)]
            await asyncio.gather(*(call.write(verifying(PROMPT)) for call in calls[::2]), return_exceptions=True)
            for call in calls:
                call.cancel()
            del calls, call
            await until(lambda: len(asyncio.all_tasks()) <= tasks + 1 and not next(iter(site.verifier.sessions)).in_use)
            counted.append(objects())
        assert counted[-1] - counted[1] < 100, f"{counted} objects, after 100 streams more each time"
