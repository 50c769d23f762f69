"""Several servers asked for the same thing, scripted: who is asked when, and whose answer counts."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

import pytest

from tandem.rpc.errors import TandemError
from tandem.rpc.remote_session import RemoteSession
from tests.support import run, until

GONE = TandemError("UNAVAILABLE", "gone")


class Servers(RemoteSession):
    """`scripts`: what each server does, one entry for each time that it is asked: an answer, an error, or a wait."""

    def __init__(self, slow: float = 3600.0, pause: float = 0.0, **scripts: list[Any]) -> None:
        self.scripts, self.slow, self.pause = scripts, slow, pause
        self.asked: list[str] = []
        self.cancelled: list[str] = []
        self.failures: list[str] = []
        self.give_up_after = 100

    async def _open_at(self, name: str, prefix: Any, others: Any) -> str:
        self.asked.append(name)
        step = self.scripts[name].pop(0)
        if isinstance(step, Exception):
            raise step
        if isinstance(step, asyncio.Event):
            try:
                await step.wait()
            except asyncio.CancelledError:
                self.cancelled.append(name)
                raise
            return f"{name} at last"
        return f"{step}"

    def _following(self, asked: Collection[str]) -> str | None:
        return next((name for name, left in self.scripts.items() if left and name not in asked), None)

    def _pause(self, name: str, error: TandemError, prefix: Any) -> float:
        self.failures.append(name)
        if error.code == "INVALID_ARGUMENT" or len(self.failures) >= self.give_up_after:
            raise error
        return self.pause

    def _before_another(self, more: float = 0.0) -> float:
        return self.slow

    async def first(self) -> Any:
        return await self._first(())


def test_while_one_takes_long_another_is_asked_and_the_loser_is_cancelled() -> None:
    async def test() -> None:
        servers = Servers(slow=0.001, a=[asyncio.Event()], b=["yes"])
        assert await servers.first() == ("b", "yes")
        assert servers.cancelled == ["a"] and not servers.failures

    run(test())


def test_one_that_is_slow_and_answers_first_all_the_same_is_taken() -> None:
    async def test() -> None:
        done = asyncio.Event()
        servers = Servers(slow=0.001, a=[done], b=[asyncio.Event()])
        racing = asyncio.create_task(servers.first())
        await until(lambda: servers.asked == ["a", "b"])
        done.set()
        assert await racing == ("a", "a at last")
        assert servers.cancelled == ["b"] and not servers.failures

    run(test())


def test_one_that_failed_is_asked_again_while_another_is_slow() -> None:
    async def test() -> None:
        servers = Servers(slow=0.001, a=[asyncio.Event()], b=[GONE, GONE, "yes"])
        assert await servers.first() == ("b", "yes")
        assert servers.asked == ["a", "b", "b", "b"]

    run(test())


def test_giving_up_on_others_does_not_end_what_is_under_way() -> None:
    async def test() -> None:
        done = asyncio.Event()
        servers = Servers(slow=0.001, a=[done], b=[GONE, GONE, "never"])
        servers.give_up_after = 2
        racing = asyncio.create_task(servers.first())
        await until(lambda: len(servers.failures) == 2)
        done.set()
        assert await racing == ("a", "a at last")
        assert servers.asked == ["a", "b", "b"]

    run(test())


def test_what_is_wrong_with_the_request_ends_it_at_once() -> None:
    async def test() -> None:
        servers = Servers(slow=0.001, a=[asyncio.Event()], b=[TandemError("INVALID_ARGUMENT", "prefix: empty")])
        with pytest.raises(TandemError, match="prefix: empty"):
            await servers.first()
        assert servers.cancelled == ["a"]

    run(test())
