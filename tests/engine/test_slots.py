"""KV slots: lowest first, waited for in order, never lost."""

from __future__ import annotations

import asyncio
import random
from contextvars import ContextVar

import pytest

from tandem.engine.slots import NoFreeSlot, SlotPool


async def test_a_free_slot_goes_to_the_caller_that_has_the_fewest() -> None:
    pool, who = SlotPool(3), ContextVar("who", default="")
    pool.caller = who.get
    order: list[str] = []

    async def wait(name: str) -> int:
        who.set(name)
        slot = await pool.acquire()
        order.append(name)
        return slot

    for name in ("greedy", "greedy", "greedy"):
        await asyncio.create_task(wait(name))
    tasks = []
    for name in ("greedy", "greedy", "modest", "greedy", "other", "modest"):
        tasks.append(asyncio.create_task(wait(name)))
        await asyncio.sleep(0)
    for slot in (0, 1, 2, 0, 1, 2):  # each is released as soon as it has its turn
        pool.release(slot)
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    # With each release greedy has 2, 1, 0 of its first three; at the fourth modest has none again.
    assert order[3:] == ["modest", "other", "greedy", "modest", "greedy", "greedy"]


@pytest.mark.parametrize("seed", range(5))
async def test_whatever_happens_no_slot_is_lost_or_lent_twice(seed: int) -> None:
    rng = random.Random(seed)
    pool, lent = SlotPool(3), set()

    async def use() -> None:
        slot = await pool.acquire()
        assert slot not in lent
        lent.add(slot)
        try:
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)
        finally:
            lent.remove(slot)
            pool.release(slot)

    tasks = [asyncio.create_task(use()) for _ in range(60)]
    for task in tasks:
        if rng.random() < 0.5:
            task.cancel()
        if rng.random() < 0.5:
            await asyncio.sleep(0)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(r is None or isinstance(r, asyncio.CancelledError) for r in results)
    assert pool.free == 3


async def test_the_queue_is_bounded() -> None:
    pool = SlotPool(1, max_waiting=2)
    pool.take()
    tasks = [asyncio.create_task(pool.acquire()) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(NoFreeSlot, match="2 requests wait"):
        await pool.acquire()
    for task in tasks:
        pool.release(0)
        await task
    pool.release(0)
    assert pool.free == 1
