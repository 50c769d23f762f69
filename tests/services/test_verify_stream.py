"""VerifyStream over the wire: in order, stale without computation, bounded, and nothing left behind."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator

from tandem.services.server_duplex import MAX_AHEAD, answered_in_order
from tests.support import PROMPT, opening, raw_stub, target_site, until, verifying


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
