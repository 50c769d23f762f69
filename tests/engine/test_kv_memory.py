"""KV slots: waited for in order, never lost, and shared memory of which none takes more than it said."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import AsyncIterator, Sequence
from contextvars import ContextVar
from typing import Any

import pytest

from tandem.engine.batcher import Batcher
from tandem.engine.engine import Engine
from tandem.engine.fused_rounds import FusedPair, FusedRounds
from tandem.engine.model_drafter import ModelDrafter
from tandem.engine.prefix_cache import PrefixSharing, share_prefixes
from tandem.engine.sequences import LocalVerifier
from tandem.engine.slots import HOLD_SECONDS, MAX_PASSED, KVMemory, NoFreeSlot, SlotPool, limit_kv_memory
from tandem.runners.protocol import PrefillRow, RowFailed, VerifyRow
from tandem.speculation.types import LengthPlan, Request
from tests.daily import daily
from tests.speculation.virtual_time import in_virtual_time
from tests.support import GREEDY, oracle, toy
from tests.toy import ToyConfig, ToyRunner

SLOTS, LENGTH = 8, 160
WHOLE = 1408
"""Bytes that a toy takes for a sequence of LENGTH tokens and the drafts beyond it: 176 positions of 8 bytes."""


class Watched(ToyRunner):
    """Notes the most memory that runners of a process had after a step, and the rows that failed."""

    together: list[Watched]

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.together, self.most, self.failed = [self], 0, 0

    def work(self) -> None:
        super().work()
        self.most = max(self.most, sum(each.taken() for each in self.together))

    def verify_one(self, row: VerifyRow) -> Any:
        result = super().verify_one(row)
        self.failed += isinstance(result, RowFailed)
        return result


def pool_of(limit: int, slots: int = 4, most: int = 100) -> tuple[SlotPool, list[int]]:
    """A pool whose tokens take a byte each, and the slots whose pages were given back."""
    pool, given = SlotPool(slots), list[int]()
    pool.memory = KVMemory(limit, most, lambda tokens: tokens, given.append)
    return pool, given


@contextlib.asynccontextmanager
async def shared(limit: int, drafts: bool = False, prefixes: bool = False) -> AsyncIterator[tuple[Engine, Engine]]:
    """Engines of a target and a draft whose sequences share `limit` bytes; without `drafts` the target has all."""
    batcher = Batcher("test")
    runners = [toy(ToyConfig(), SLOTS, LENGTH, kind=Watched), toy(ToyConfig(miss=0.4), SLOTS, LENGTH, kind=Watched)]
    target, draft = Engine(runners[0], batcher, vital=False), Engine(runners[1], batcher, vital=False)
    used = runners if drafts else runners[:1]
    for each in used:
        each.together = used
    limit_kv_memory(target.slots, batcher, used, limit)
    if prefixes:
        await share_prefixes([target], PrefixSharing("all", 1), lambda: None)
    try:
        yield target, draft
        assert target.slots.memory.reserved == 0 and target.slots.free == SLOTS
        assert max(each.most for each in used) <= limit
        assert [each.failed for each in used] == [0] * len(used)
    finally:
        await batcher.close()


# --- who gets memory, and when ---


def test_who_says_nothing_of_its_length_reserves_a_whole_slot() -> None:
    pool, _ = pool_of(limit=250)
    assert [pool.take(), pool.take(tokens=1000)] == [0, 1]
    with pytest.raises(NoFreeSlot, match=r"memory of KV slots \(kv_cache_mb\) is taken: 200 of 250"):
        pool.take()
    assert pool.take(tokens=50) == 2


def test_a_long_sequence_is_passed_by_some_then_has_its_turn_and_holds_others_back_for_a_bounded_time() -> None:
    async def passing(pool: SlotPool, count: int) -> None:
        for _ in range(count):
            pool.release(await asyncio.wait_for(pool.acquire(tokens=10), 0.1))

    async def test() -> None:
        pool, _ = pool_of(limit=100)
        first = await pool.acquire(tokens=50)
        long = asyncio.ensure_future(pool.acquire(tokens=100))
        await asyncio.sleep(0)
        await passing(pool, 2 * MAX_PASSED)  # holding back would not help, as long as one that came earlier runs
        later = await pool.acquire(tokens=10)
        pool.release(first)
        for _ in range(2):
            began = asyncio.get_running_loop().time()
            pool.release(await pool.acquire(tokens=10))
            assert 0 <= asyncio.get_running_loop().time() - began - HOLD_SECONDS < 1
            await passing(pool, MAX_PASSED - 1)
        short = asyncio.ensure_future(pool.acquire(tokens=10))
        await asyncio.sleep(0)
        pool.release(later)
        slot = await long
        assert not short.done()
        pool.release(slot)
        assert await short == slot

    in_virtual_time(test())


# --- what sequences take ---


async def said(engine: Engine, prompt: Sequence[int], count: int, sampling: Any = GREEDY, k: int = 3) -> list[int]:
    """What the target says, with random drafts of up to `k` tokens; fills its extent to the last position."""
    verifier, tokens = LocalVerifier(engine, Request(sampling, max_new_tokens=count)), list(prompt)
    chance = random.Random(len(prompt) * 1000 + count)
    try:
        await verifier.open(tokens)
        while (left := len(prompt) + count - len(tokens)) > 0:
            truth = oracle(tokens, sampling, min(k, left - 1), past_the_end=True)
            draft = [t if chance.random() < 0.7 else 7 for t in truth]
            tokens += (await verifier.verify(tokens, draft)).token_ids
    finally:
        await verifier.close()
    return tokens[len(prompt) :]


@pytest.mark.parametrize("seed", daily(range(3), 1))
async def test_whatever_is_cancelled_whenever_memory_comes_back_and_nothing_is_taken_twice(seed: int) -> None:
    """Requests of random lengths, some left in the middle; target and draft share the memory."""
    rng = random.Random(seed)

    async def one(pair: FusedPair, prompt: list[int], count: int) -> None:
        rounds, tokens = FusedRounds(pair, Request(GREEDY, max_new_tokens=count)), list(prompt)
        try:
            await rounds.open(tokens)
            while (left := len(prompt) + count - len(tokens)) > 0:
                _, verdict = await rounds.round(tokens, LengthPlan(5, 5).within(left - 1))
                tokens += verdict.token_ids
        finally:
            await rounds.close()
        assert tuple(tokens[len(prompt) :]) == oracle(prompt, GREEDY, count, past_the_end=True)

    async with shared(3 * WHOLE, drafts=True) as (target, draft):
        pair = FusedPair(target, draft)
        tasks = []
        for _ in range(30):
            prompt = [rng.randrange(256) for _ in range(rng.choice([2, 5, 60, 100]))]
            tasks.append(asyncio.ensure_future(one(pair, prompt, rng.choice([1, 4, 20, LENGTH - len(prompt)]))))
            if rng.random() < 0.4:
                asyncio.get_running_loop().call_later(rng.random() * 0.05, rng.choice(tasks).cancel)
            await asyncio.sleep(rng.random() * 0.003)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [r for r in results if r is not None and not isinstance(r, asyncio.CancelledError)] == []


async def test_pages_go_back_only_after_the_step_that_may_still_write_them() -> None:
    """A request is left while its step runs; who comes next needs its pages at once."""

    gate = threading.Event()

    class Gated(Watched):
        def prefill(self, rows: Sequence[PrefillRow]) -> Any:
            if rows[0].start == 32:
                gate.wait(30)
            return super().prefill(rows)

    batcher, runner = Batcher("test"), toy(slots=SLOTS, max_length=LENGTH, chunk=32, kind=Gated)
    engine = Engine(runner, batcher, vital=False)
    limit_kv_memory(engine.slots, batcher, [runner], WHOLE)
    left = asyncio.ensure_future(said(engine, list(range(100)), 50))
    while not (batcher.running[1] and batcher.running[1][0].start == 32):
        await asyncio.sleep(0)
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    keeps_lowest = engine.slots.take(1)  # so that the next one has another slot
    next_one = asyncio.ensure_future(said(engine, [1, 2, 3], LENGTH - 19))
    await asyncio.sleep(0.01)
    gate.set()
    assert tuple(await next_one) == oracle([1, 2, 3], GREEDY, LENGTH - 19, past_the_end=True)
    engine.slots.release(keeps_lowest)
    assert runner.most <= WHOLE
    await batcher.close()


async def test_a_drafter_drafts_nothing_beyond_what_it_reserved() -> None:
    batcher, runner = Batcher("test"), toy(slots=SLOTS, max_length=LENGTH, kind=Watched)
    engine = Engine(runner, batcher, vital=False)
    limit_kv_memory(engine.slots, batcher, [runner], WHOLE)
    drafter = ModelDrafter(engine, Request(GREEDY, max_new_tokens=10), 258)
    await drafter.open([1, 2, 3])
    assert len((await drafter.propose([1, 2, 3, *range(8)], LengthPlan(5, 5))).token_ids) == 2
    assert (await drafter.propose([1, 2, 3, *range(10)], LengthPlan(5, 5))).token_ids == ()
    assert engine.slots.memory.reserved == runner.kv_bytes(13) < WHOLE
    await drafter.close()
    assert engine.slots.memory.reserved == 0
    await batcher.close()


# --- what cannot be ---


def test_too_little_memory_for_one_sequence_is_refused_by_name() -> None:
    runner = toy(slots=SLOTS, max_length=LENGTH)
    limit_kv_memory(SlotPool(SLOTS), Batcher("test"), [runner, runner], 2 * WHOLE)
    with pytest.raises(ValueError, match="kv_cache_mb: 0 is too little for a sequence of sequence_length 160, which"):
        limit_kv_memory(SlotPool(SLOTS), Batcher("test"), [runner, runner], 2 * WHOLE - 1)


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
