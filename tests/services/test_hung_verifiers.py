"""Of two verifiers the first hangs: requests are opened, and go on, at the second, with the same tokens (G1, G12).

It only has to happen here, and calls are counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from tandem.rpc.verifier_client import Deadlines
from tandem.speculation.verification_mode import Pipeline
from tests.daily import daily
from tests.support import SAMPLED, Site, answer, distributed, ids, in_front, oracle, target_site, until

PROMPT = list(b"abcabcabcab")
REQUEST = ids(PROMPT, 60, sampling=SAMPLED, ignore_end_of_sequence=True)
TRUTH = oracle(PROMPT, SAMPLED, 60, past_the_end=True)
STALL = Deadlines(stall=1.0)  # a round of the second must not take as long on a busy machine
BOTH = pytest.mark.parametrize(
    "pipeline", [Pipeline.OFF, Pipeline.ON, Pipeline.NEVER_WAITING], ids=["unary", "stream", "run"]
)


class Hanging:
    """Methods in front of a TargetVerifier's, whose rounds and openings can hang."""

    def __init__(self) -> None:
        self.going = asyncio.Event()
        self.going.set()
        self.opened = self.rounds = 0
        self.hangs_after: int | None = None

    async def open(self, inner: Any, request: Any, context: Any) -> Any:
        self.opened += 1
        await self.going.wait()
        return await inner.OpenSession(request, context)

    async def verify(self, inner: Any, request: Any, context: Any) -> Any:
        await self._counted(1)
        return await inner.Verify(request, context)

    async def stream(self, inner: Any, requests: Any, context: Any) -> AsyncIterator[Any]:
        async with contextlib.aclosing(inner.VerifyStream(requests, context)) as replies:
            async for reply in replies:
                await self._counted(1 + len(reply.next_steps))
                yield reply

    async def _counted(self, steps: int) -> None:
        self.rounds += steps
        if self.hangs_after is not None and self.rounds > self.hangs_after:
            self.hangs_after = None
            self.going.clear()
        await self.going.wait()


@contextlib.asynccontextmanager
async def hanging_site(site: Site) -> AsyncIterator[tuple[Hanging, str]]:
    its = Hanging()
    async with in_front(site, OpenSession=its.open, Verify=its.verify, VerifyStream=its.stream) as address:
        yield its, address


@contextlib.asynccontextmanager
async def first_hangs(pipeline: Pipeline = Pipeline.OFF, deadlines: Deadlines = STALL) -> AsyncIterator[Any]:
    """The first verifier, the second, both sites, and the loop, which asks the first."""
    async with (
        target_site() as one,
        target_site() as two,
        hanging_site(one) as (first, at_first),
        hanging_site(two) as (second, at_second),
        distributed(f"{at_first},{at_second}", "miss=0.3", pipeline=pipeline, reconnect_seconds=60) as (loop, client),
    ):
        client.deadlines, client.pool.current = deadlines, at_first
        client.endpoints[at_first].suspect, client.endpoints[at_second].suspect = False, True
        yield first, second, (one, two), loop, client
        await until(lambda: not client.closes, 10.0)
        assert two.free == 4


@pytest.mark.each_value
@BOTH
@pytest.mark.parametrize("seconds", daily([None, 30.0], 1), ids=["no deadline", "deadline"])
async def test_a_request_is_opened_at_the_second(pipeline: Pipeline, seconds: float | None) -> None:
    async with first_hangs(pipeline) as (first, second, _, loop, client):
        first.going.clear()
        deadline = seconds and time.monotonic() + seconds
        assert (await answer(loop.generate, replace(REQUEST, deadline=deadline))).token_ids == TRUTH
        assert first.opened == 1 and second.opened >= 1
        assert not client.endpoint.suspect  # it said what it runs before a session went there
        assert (await answer(loop.generate, REQUEST)).token_ids == TRUTH
        assert first.opened == 1, "the next request asks the second at once"


@pytest.mark.each_value
@BOTH
@pytest.mark.parametrize("seconds", daily([None, 30.0], 1), ids=["no deadline", "deadline"])
async def test_a_request_that_is_under_way_goes_on_at_the_second(
    pipeline: Pipeline, seconds: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    async with first_hangs(pipeline) as (first, second, _, loop, _client):
        first.hangs_after = 5
        deadline = seconds and time.monotonic() + seconds
        assert (await answer(loop.generate, replace(REQUEST, deadline=deadline))).token_ids == TRUTH
        assert first.rounds >= 6 and second.opened >= 1 and second.rounds > 5
    said = [record.getMessage() for record in caplog.records if " failed (" in record.getMessage()]
    assert "no answer came within" in said[0]


async def test_a_long_prefill_is_no_hang(caplog: pytest.LogCaptureFixture) -> None:
    """Both take long: the first is waited for, and has not failed."""
    async with first_hangs() as (first, second, (one, two), loop, client):
        first.going.clear()
        second.going.clear()
        asking = asyncio.create_task(answer(loop.generate, REQUEST))
        await until(lambda: second.opened == 1, 30.0)
        first.going.set()
        assert (await asking).token_ids == TRUTH
        assert (first.opened, second.opened, second.rounds) == (1, 1, 0)
        assert client.address == client.pool.addresses[0] and not client.endpoints[client.address].suspect
        assert one.free == two.free == 4
    assert " failed (" not in caplog.text


@BOTH
async def test_one_verifier_alone_is_waited_for(pipeline: Pipeline) -> None:
    async with (
        target_site() as site,
        hanging_site(site) as (only, address),
        distributed(address, "miss=0.3", pipeline=pipeline) as (loop, client),
    ):
        client.deadlines = Deadlines(stall=0.01)
        only.hangs_after = 5
        asking = asyncio.create_task(answer(loop.generate, REQUEST))
        await until(lambda: not only.going.is_set())
        await asyncio.sleep(0.1)
        only.going.set()
        assert (await asking).token_ids == TRUTH
        assert only.opened == 1
