"""Who waits for memory holds others back for a bounded time, and has its turn all the same: in virtual time."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from tandem.engine.holds import FIRST, LONGEST, REST, Holds
from tandem.engine.kv_memory import KVMemory
from tandem.engine.slots import NoFreeSlot, SlotPool
from tests.daily import daily
from tests.speculation.virtual_time import in_virtual_time

LIMIT = 100


def pool_of(slots: int = 8) -> SlotPool:
    """A pool whose tokens take a byte each."""
    pool = SlotPool(slots)
    pool.memory = KVMemory(LIMIT, LIMIT, lambda tokens: tokens, lambda slot, tokens: None)
    return pool


def now() -> float:
    return asyncio.get_running_loop().time()


# --- the holds themselves: pure ---


def test_a_hold_is_twice_as_long_each_time_for_the_same_one_and_short_for_another() -> None:
    holds, at, lengths = Holds(), 100.0, []
    for who in ["a"] * 8 + ["b", "a"]:
        assert holds.begins(who, at) and not holds.begins(who, at) and holds.on(at)
        lengths.append(holds.until - at)
        at = holds.until
        assert not holds.on(at) and not holds.begins("c", at)
        at += REST * lengths[-1]
    assert lengths == [1, 2, 4, 8, 16, 32, 32, 32, 1, 1] and (FIRST, LONGEST) == (1, 32)


# --- the queue ---


@dataclass
class Watched:
    """Notes for how long somebody who fits was not served, and the longest that one waited since nobody was before."""

    pool: SlotPool
    locked: float = 0.0
    longest: float = 0.0
    first: float = 0.0
    _stretch: float = 0.0
    _heads: dict[int, float] = field(default_factory=dict)

    async def run(self, step: float = 0.05) -> None:
        while True:
            waiting = [place for place in self.pool.queue if place.turn is not None and not place.turn.done()]
            locked = any(self.pool.fits(place.tokens) for place in waiting)
            self.locked += step * locked
            self._stretch = self._stretch + step if locked else 0.0
            self.longest = max(self.longest, self._stretch)
            if self.pool.queue:
                head = self.pool.queue[0].number
                self.first = max(self.first, now() - self._heads.setdefault(head, now()))
            await asyncio.sleep(step)


async def use(pool: SlotPool, tokens: int, seconds: float) -> float:
    """Waits for a slot, has it for `seconds`; returns how long it waited."""
    began = now()
    slot = await pool.acquire(tokens=tokens)
    waited = now() - began
    try:
        await asyncio.sleep(seconds)
    finally:
        pool.release(slot)
    return waited


async def asks_again_and_again(pool: SlotPool, names: Iterator[str], tokens: int, pause: float = 0.1) -> float:
    """Opens as a client of a full server does, half a second at a time; returns when it had a slot, and gives it up."""
    while True:
        try:
            pool.release(await pool.acquire(0.5, next(names), tokens))
            return now()
        except NoFreeSlot:
            await asyncio.sleep(pause)


async def end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


SAME_NAME, NEW_NAMES = itertools.repeat("mallory"), (f"mallory {n}" for n in itertools.count())


@pytest.mark.parametrize("names", [SAME_NAME, NEW_NAMES], ids=["one name", "new names"])
def test_who_cannot_fit_holds_nobody_back_and_has_its_turn_once_it_can(names: Iterator[str]) -> None:
    """59 % are taken; one who holds nothing asks for all again and again, and is served like one who waits."""

    async def test() -> None:
        pool = pool_of()
        taken = await pool.acquire(tokens=59)
        mallory = asyncio.create_task(asks_again_and_again(pool, names, LIMIT))
        await asyncio.sleep(1.0)
        waits = [await use(pool, 10, 0.3) for _ in range(80)]
        assert max(waits) == 0.0, "a small request waited"

        async def loop() -> None:
            while True:
                await use(pool, 10, 0.3)

        loops = [asyncio.create_task(loop()) for _ in range(3)]
        pool.release(taken)
        released = now()
        if names is SAME_NAME:
            assert await asyncio.wait_for(mallory, 60) - released < 2.0
        await end([mallory, *loops])

    in_virtual_time(test())


@pytest.mark.parametrize("names", [SAME_NAME, NEW_NAMES], ids=["one name", "new names"])
def test_who_asks_for_all_memory_for_ever_costs_the_others_a_quarter_at_most(names: Iterator[str]) -> None:
    """Each time it has waited long enough it takes all, and gives it up at once."""

    async def served(attacked: bool) -> int:
        pool, done, chance = pool_of(), [0], random.Random(1)

        async def loop() -> None:
            while True:
                await use(pool, 20, chance.uniform(0.2, 4.0))
                done[0] += 1

        async def attack() -> None:
            while True:
                await asks_again_and_again(pool, names, LIMIT)

        tasks = [asyncio.create_task(loop()) for _ in range(5)]
        watched = Watched(pool)
        tasks += [asyncio.create_task(attack()), asyncio.create_task(watched.run())] if attacked else []
        await asyncio.sleep(400.0)
        await end(tasks)
        assert watched.longest <= LONGEST + 0.1 and watched.locked <= 400 / (1 + REST) + LONGEST
        return done[0]

    undisturbed, disturbed = in_virtual_time(served(False)), in_virtual_time(served(True))
    assert disturbed > 0.7 * undisturbed, f"{disturbed} of {undisturbed}"


@pytest.mark.parametrize("seed", daily(range(12), 0))
def test_nobody_starves_and_nobody_is_locked_out(seed: int) -> None:
    """Short and long requests that stay for up to `most` seconds each, and one who asks for all by new names."""
    chance, most, slots = random.Random(seed), 3.0 + 8 * (seed % 3), 12

    async def test() -> None:
        pool = pool_of(slots)
        watched = Watched(pool)
        background = [asyncio.create_task(watched.run())]
        if seed % 2:
            background.append(asyncio.create_task(asks_again_and_again(pool, NEW_NAMES, LIMIT)))
        tasks, began = [], now()
        for _ in range(300):
            tokens = chance.randrange(60, LIMIT + 1) if chance.random() < 0.03 else chance.randrange(5, 25)
            tasks.append(asyncio.create_task(use(pool, tokens, chance.uniform(0.05, most))))
            await asyncio.sleep(chance.expovariate(14 / most))
        await asyncio.wait_for(asyncio.gather(*tasks), 1000 * most)
        # The end of a rest, holds that double up to `most` with their rests, a last hold, and what had a slot before.
        assert watched.first <= (6 + 8 + 1 + 1) * most + 4 * FIRST
        assert watched.longest <= 2 * most + 0.1
        assert watched.locked <= (now() - began) / (1 + REST) + LONGEST
        await end(background)
        assert pool.free == slots and pool.memory and pool.memory.reserved == 0

    in_virtual_time(test())
