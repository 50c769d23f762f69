"""What may happen to a run, one thing at a time, by the server's own counts: slow readers, stops that are lost,
deadlines, messages that come twice, late or to another's session. The campaigns mix all of it."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from tandem.engine.stepper import MOST_AHEAD
from tandem.rpc.errors import TandemError
from tandem.speculation.run_on import MAX_UNREAD
from tandem.speculation.types import Chunk
from tandem.speculation.verification_mode import Pipeline
from tandem.v1 import target_verifier_pb2 as pb
from tests.daily import daily
from tests.reliability import frames
from tests.reliability.faults import Fault, FaultInterceptor, Schedule
from tests.reliability.history import History
from tests.services.test_runs import PROMPT, SLOW, opening, read, running, said, status, truth
from tests.support import SAMPLED, Site, distributed, ids, oracle, raw_stub, run, target_site, toy, until
from tests.toy import ToyConfig

LONG = 1900


def only_session(site: Site) -> Any:
    assert site.verifier
    (session,) = site.verifier.sessions
    return session


async def paused(site: Site) -> int:
    """Waits until the only run pauses, and returns how many tokens it has committed."""
    session = only_session(site)
    await until(lambda: session.resources.run is not None and session.resources.run.run.next_draft() is None)
    return len(session.tokens) - len(PROMPT)


@contextlib.asynccontextmanager
async def slow_reader(site: Site, count: int, **rest: Any) -> AsyncIterator[AsyncIterator[Any]]:
    """A request of ours over a run, whose chunks are read one at a time."""
    async with (
        distributed(site.address, "salt=0,miss=0.2", max_length=2000, pipeline=Pipeline.NEVER_WAITING) as (made, _),
        contextlib.aclosing(made.generate(ids(PROMPT, count, ignore_end_of_sequence=True, **rest))) as events,
    ):
        yield events


def test_a_caller_who_reads_slowly_keeps_the_target_within_its_window() -> None:
    """The server counts: whenever the caller pauses, the target stops, at most a window ahead of what was read."""

    async def test() -> None:
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

    run(test())


def test_a_connection_that_reads_nothing_stops_the_target_and_loses_its_lease() -> None:
    """Its HTTP/2 window is 0: not even the transport takes a reply."""

    async def test() -> None:
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

    run(test())


def test_steps_that_were_read_ahead_and_never_used_are_waste() -> None:
    """A caller who reads slowly and stops at a text: what came meanwhile was made for nothing."""

    async def test() -> None:
        text = bytes(truth(60, SAMPLED))
        at = next(i for i in range(10, 50) if 32 < text[i] < 127 and text[i] not in text[:i])
        steps = 0

        def ended(session: Any, how: str) -> None:
            nonlocal steps
            steps += session.resources.steps

        async with target_site(toy(max_length=2000)) as site:
            site.verifier.sessions.on_end.append(ended)
            rest = {"sampling": SAMPLED, "stop_strings": (chr(text[at]),)}
            async with slow_reader(site, LONG, **rest) as events:
                tokens: list[int] = []
                async for event in events:
                    if isinstance(event, Chunk):
                        tokens += event.token_ids
                        await paused(site)
                    else:
                        stats = event.stats
            assert tokens == list(text[: at + 1])
            assert stats.wasted_steps > 50
            assert stats.run_steps + stats.wasted_steps == steps

    run(test())


def test_a_stop_whose_reply_was_lost_ends_the_next_run_too() -> None:
    """G2: the step is replayed, and its stop counts: nothing is committed after it."""
    text = truth(40)
    end = text.index(text[10]) + 1

    async def test() -> None:
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
            assert (await status(again))[0] == "NOT_FOUND"

    run(test())


@pytest.mark.each_value
@pytest.mark.parametrize("stops", [True, False])
@pytest.mark.parametrize("seed", daily(range(3), 0, 1))
def test_stop_strings_and_waste_hold_where_streams_break(seed: int, stops: bool) -> None:
    """Steps are counted by the target: those that were used, and those that were not, are all of them."""
    chance = random.Random(f"stop strings {seed}")
    text = bytes(truth(80, SAMPLED))
    at = chance.choice([i for i in range(20, 70) if 32 < text[i] < 127])
    steps = 0

    def ended(session: Any, how: str) -> None:
        nonlocal steps
        steps += session.resources.steps

    async def test() -> None:
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

    run(test())


def test_a_deadline_in_the_middle_of_a_run_leaves_the_tokens_so_far_and_nothing_else() -> None:
    async def test() -> None:
        async with target_site(toy(SLOW, max_length=2000)) as site:
            tokens: list[int] = []
            with pytest.raises(TandemError) as caught:
                async with slow_reader(site, LONG, deadline=time.monotonic() + 1.0) as events:
                    async for event in events:
                        tokens += event.token_ids
            assert caught.value.code == "DEADLINE_EXCEEDED"
            assert list(caught.value.produced)[: len(tokens)] == tokens == truth(len(tokens))
            await until(lambda: site.free == 4)
            steps = site.engine.batcher.steps
            await asyncio.sleep(0.1)
            assert site.engine.batcher.steps <= steps + 1  # one was under way

    run(test())


def test_the_first_message_of_a_run_that_comes_again_late_disturbs_nothing() -> None:
    """G2: behind the last step it is stale; at the last step's base the new stream goes on, and no token is lost."""
    text = truth(30)

    async def test() -> None:
        async with target_site() as site, raw_stub(site.address) as target:
            await target.OpenSession(opening())
            call, late, twin = target.VerifyStream(), target.VerifyStream(), target.VerifyStream()
            first = running(PROMPT, until=10)
            await call.write(first)
            assert said(await read(call, 10)) == text[:10]
            await late.write(first)
            reply = await late.read()
            assert (reply.stale, reply.committed_length) == (True, len(PROMPT) + 10)
            assert await late.read() is grpc.aio.EOF
            await call.write(running(PROMPT + text[:10], until=12))
            assert said(await read(call, 2)) == text[10:12]
            await twin.write(running(PROMPT + text[:11], until=20))
            replies = await read(twin, 9)
            assert said(replies) == text[11:20] and replies[0].replayed
            assert await call.read() is grpc.aio.EOF
            twin.cancel()

    run(test())


def test_two_runs_that_begin_at_once_are_one_after_the_other() -> None:
    """G2, G6: whichever comes second replays the other's last step, or is stale; every token is made once."""
    text = truth(20)

    async def test() -> None:
        async with target_site() as site, raw_stub(site.address) as target:
            await target.OpenSession(opening())
            before = site.engine.batcher.steps
            calls = [target.VerifyStream() for _ in range(4)]
            await asyncio.gather(*(call.write(running(PROMPT, until=20)) for call in calls))

            async def whole(call: Any) -> list[Any]:
                replies = []
                while (reply := await call.read()) is not grpc.aio.EOF:
                    replies.append(reply)
                    if reply.committed_length == len(PROMPT) + 20:
                        break
                return replies

            seen = [reply for replies in await asyncio.gather(*map(whole, calls)) for reply in replies]
            for reply in seen:
                assert reply.stale or list(reply.token_ids) == [text[reply.committed_length - len(PROMPT) - 1]]
            assert max(reply.committed_length for reply in seen) == len(PROMPT) + 20
            taken = site.engine.batcher.steps - before - 20
            assert 0 <= taken <= 3 * (MOST_AHEAD + 1)  # what a run has begun by itself is dropped with it
            for call in calls:
                call.cancel()

    run(test())
