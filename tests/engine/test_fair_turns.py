"""Callers take turns where few can work at a time."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

import pytest

from tandem.engine.fair_turns import FairThread, FairTurns, TooManyWaiting

WHO: ContextVar[str] = ContextVar("who")


class Forbidden(ThreadPoolExecutor):
    def submit(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("asyncio's own threads are not for this")


class Work:
    """Turns that last until they are told to end. `began` and `ended`: whose, in order."""

    def __init__(self, most: int, waiting: int = 256) -> None:
        self.turns = FairTurns("a test", most, waiting)
        self.turns.caller = WHO.get
        self.began: list[str] = []
        self.end = asyncio.Semaphore(0)
        self.running = self.most = 0

    def of(self, who: str) -> asyncio.Task[None]:
        WHO.set(who)
        return asyncio.create_task(self._one(who))

    async def _one(self, who: str) -> None:
        async with self.turns.turn():
            self.began.append(who)
            self.running += 1
            self.most = max(self.most, self.running)
            await self.end.acquire()
            self.running -= 1


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_one_caller_of_many_requests_keeps_nobody_waiting_for_more_than_one_of_them() -> None:
    work = Work(2)
    tasks = [work.of("alice") for _ in range(99)]
    await settled()
    assert work.began == ["alice"], "one of each caller at a time, so that a place is free for others"
    tasks += [work.of("bob"), work.of("carol"), work.of("carol")]
    await settled()
    assert work.began == ["alice", "bob"]
    for _ in range(4):
        work.end.release()
        await settled()
    assert work.began[2:] == ["carol", "alice", "carol", "alice"]
    for _ in tasks:
        work.end.release()
    await asyncio.gather(*tasks)
    assert len(work.began) == 102 and work.most == 2


async def test_a_request_that_is_cancelled_takes_no_turn_and_gives_back_the_one_that_it_has() -> None:
    work = Work(1, waiting=2)
    first, waits, last = work.of("a"), work.of("a"), work.of("b")
    await settled()
    waits.cancel()
    first.cancel()
    await settled()
    assert work.began == ["a", "b"]
    for _ in range(5):  # those that have left do not count among those that wait
        left = work.of("b")
        await settled()
        left.cancel()
        await settled()
    goes = work.of("a")
    last.cancel()  # which gives the turn to one that is cancelled before it hears of it
    goes.cancel()
    await settled()
    after = work.of("c")
    work.end.release()
    await after
    assert work.began == ["a", "b", "c"]


async def test_beyond_the_limit_a_caller_is_refused_and_others_are_not() -> None:
    work = Work(1, waiting=2)
    tasks = [work.of("a") for _ in range(3)]
    await settled()
    with pytest.raises(TooManyWaiting, match="2 of your requests wait for a test, the limit is 2"):
        await work.of("a")
    tasks.append(work.of("b"))
    for _ in tasks:
        work.end.release()
    await asyncio.gather(*tasks)
    assert work.began.count("b") == 1


async def test_a_thread_does_one_thing_at_a_time_and_none_of_asyncio_s_is_used() -> None:
    thread, seen = FairThread("of-a-test", "a test", 9), list[tuple[str, int]]()

    def work(n: int) -> int:
        seen.append((threading.current_thread().name, n))
        return n

    asyncio.get_running_loop().set_default_executor(Forbidden(1))
    assert await asyncio.gather(*(thread.run(work, n) for n in range(4))) == [0, 1, 2, 3]
    assert [n for _, n in seen] == [0, 1, 2, 3] and {name for name, _ in seen} == {"of-a-test_0"}
