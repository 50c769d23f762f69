"""What may happen to a run, one thing at a time, by the server's own counts: slow readers, stops that are lost,
deadlines, messages that come twice, late or to another's session. The campaigns mix all of it."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tandem.speculation.run_on import MAX_UNREAD
from tandem.speculation.types import Chunk
from tandem.speculation.verification_mode import Pipeline
from tandem.v1 import target_verifier_pb2 as pb
from tests.daily import daily
from tests.reliability import frames
from tests.reliability.faults import Fault, FaultInterceptor, Schedule
from tests.reliability.history import History
from tests.services.test_runs import read, running, truth
from tests.support import (
    PROMPT,
    SAMPLED,
    Site,
    distributed,
    ids,
    opening,
    oracle,
    raw_stub,
    refusal,
    target_site,
    toy,
    until,
)
from tests.toy import ToyConfig

LONG = 1900


def only_session(site: Site) -> Any:
    assert site.verifier
    (session,) = site.verifier.sessions
    return session


async def paused(site: Site) -> int:
    """Waits until the only run pauses, and returns how many tokens it has committed."""
    session = only_session(site)
    await until(lambda: session.run is not None and session.run.run.next_draft() is None)
    return len(session.tokens) - len(PROMPT)


@contextlib.asynccontextmanager
async def slow_reader(site: Site, count: int, **rest: Any) -> AsyncIterator[AsyncIterator[Any]]:
    """A request of ours over a run, whose chunks are read one at a time."""
    async with (
        distributed(site.address, "salt=0,miss=0.2", max_length=2000, pipeline=Pipeline.NEVER_WAITING) as (made, _),
        contextlib.aclosing(made.generate(ids(PROMPT, count, ignore_end_of_sequence=True, **rest))) as events,
    ):
        yield events


async def test_a_caller_who_reads_slowly_keeps_the_target_within_its_window() -> None:
    async with target_site(toy(max_length=2000)) as site, slow_reader(site, LONG) as events:
        tokens: list[int] = []
        ahead = []
        async for event in events:
            tokens += event.token_ids if isinstance(event, Chunk) else ()
            if len(tokens) < LONG - 2 * MAX_UNREAD and len(ahead) < len(tokens) // 60:
                ahead.append(await paused(site) - len(tokens))
        step = 6  # tokens, of which one is on its way to the caller
        assert len(ahead) >= 2 and MAX_UNREAD // 2 < max(ahead) <= MAX_UNREAD + step, ahead
        assert tokens == list(oracle(PROMPT, ids(PROMPT).sampling, LONG, past_the_end=True))


async def test_a_connection_that_reads_nothing_stops_the_target_and_loses_its_lease() -> None:
    runner = toy(max_length=2000)
    async with target_site(runner, lease_seconds=0.5) as site, raw_stub(site.address) as target:
        await target.OpenSession(opening())
        session, free = only_session(site), site.free
        first = running(PROMPT, until=LONG).SerializeToString()
        path = "/tandem.v1.TargetVerifier/VerifyStream"
        connection = await asyncio.to_thread(frames.unread, site.address, path, first, False)
        await until(lambda: site.free == free + 1)
        assert len(session.tokens) == len(PROMPT) + MAX_UNREAD
        connection.close()


async def test_a_stop_whose_reply_was_lost_ends_the_next_run_too() -> None:
    """G2: the step is replayed, and its stop counts: nothing is committed after it."""
    text = truth(40)
    end = text.index(text[10]) + 1
    async with target_site() as site, raw_stub(site.address) as target:
        await target.OpenSession(opening())
        call = target.VerifyStream()
        await call.write(running(PROMPT, stop_token_ids=[text[10]]))
        await read(call, end)
        call.cancel()
        known = PROMPT + text[: end - 1]
        reply = await target.OpenSession(opening(prefix=known))
        assert reply.committed_length == len(known) + 1
        again = target.VerifyStream()
        await again.write(running(known, stop_token_ids=[text[10]]))
        assert [r.replayed for r in await read(again, 1)] == [True]
        assert await paused(site) == end
        closed = await target.CloseSession(pb.CloseSessionRequest(session_id="s"))
        assert closed.committed_length == len(PROMPT) + end
        assert (await refusal(again)).code == "NOT_FOUND"


@pytest.mark.each_value
@pytest.mark.parametrize("stops", [True, False])
@pytest.mark.parametrize("seed", daily(range(3), 0, 1))
async def test_stop_strings_and_waste_hold_where_streams_break(seed: int, stops: bool) -> None:
    chance = random.Random(f"stop strings {seed}")
    text = bytes(truth(80, SAMPLED))
    at = chance.choice([i for i in range(20, 70) if 32 < text[i] < 127])
    steps = 0

    def ended(session: Any, how: str) -> None:
        nonlocal steps
        steps += session.steps

    only = (Fault.ABORT_AFTER, Fault.ABORT_BEFORE, Fault.DELAY)
    faults = FaultInterceptor(Schedule(seed, rate=0.3, most=20, only=only), History())
    runner = toy(ToyConfig(step_seconds=0.002))
    async with target_site(runner, interceptors=[faults]) as site:
        site.verifier.sessions.on_end.append(ended)
        async with distributed(site.address, "miss=0.3", pipeline=Pipeline.NEVER_WAITING) as (generator, _):
            ends = (chr(text[at]),) if stops else ()
            asked = ids(PROMPT, 80, sampling=SAMPLED, stop_strings=ends, ignore_end_of_sequence=True)
            tokens, stats = [], None
            async for event in generator.generate(asked):
                if isinstance(event, Chunk):
                    tokens += event.token_ids
                else:
                    stats = event.stats
        assert tokens == list(text[: text.index(text[at]) + 1] if stops else text)
        assert stats.run_steps + stats.wasted_steps == steps
        assert len(faults.history.events) > 0
