"""Runs over the wire beyond the conformance cases: batched steps, failover, waste, leases, slow readers, lost stops."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc
import pytest

from tandem.rpc.received_errors import TandemError
from tandem.services.shutdown import NotAccepting
from tandem.speculation.run_on import MAX_UNREAD
from tandem.speculation.types import Chunk
from tandem.speculation.verification_mode import Pipeline
from tandem.v1 import target_verifier_pb2 as pb
from tests.daily import daily
from tests.reliability import frames
from tests.reliability.faults import Fault, FaultInterceptor, Schedule
from tests.reliability.history import History
from tests.support import (
    GREEDY,
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

SLOW = ToyConfig(step_seconds=0.01)


def running(tokens: Sequence[int], draft: Sequence[int] = (), until: int = 40, **rest: Any) -> Any:
    rest = {"session_id": "s", "max_step_drafts": 5} | rest
    return pb.VerifyRequest(
        base_length=len(tokens), last_token=tokens[-1], draft_tokens=draft, run_until=len(PROMPT) + until, **rest
    )


def truth(count: int, sampling: Any = GREEDY) -> list[int]:
    return list(oracle(PROMPT, sampling, count, past_the_end=True))


async def read(call: Any, count: int) -> list[Any]:
    """Replies until they hold `count` tokens."""
    replies: list[Any] = []
    while sum(len(reply.token_ids) for reply in replies) < count:
        replies.append(await call.read())
        assert replies[-1] is not grpc.aio.EOF
    return replies


def said(replies: Sequence[Any]) -> list[int]:
    return [token for reply in replies for token in reply.token_ids]


async def forever(take: Callable[[], Awaitable[Any]]) -> AsyncIterator[Any]:
    while True:
        yield await take()


async def test_a_step_that_waits_for_its_session_while_another_call_takes_it_is_not_made() -> None:
    """G6: tokens that a superseded run committed would make the rounds of the call that took the session stale."""
    text = truth(9)

    def a_round(done: int) -> Any:
        return pb.VerifyRequest(session_id="s", base_length=len(PROMPT) + done, last_token=text[done - 1])

    async with target_site() as site, raw_stub(site.address) as target:
        await target.OpenSession(opening())
        messages: asyncio.Queue[Any] = asyncio.Queue()
        messages.put_nowait(running(PROMPT, until=3))
        # Replies that nobody takes keep the run's tasks from being cancelled.
        replies = site.verifier.VerifyStream(forever(messages.get), None)
        assert said([await anext(replies) for _ in range(3)]) == text[:3]
        (session,) = site.verifier.sessions
        async with session.lock:
            taking = asyncio.ensure_future(target.Verify(a_round(3)))
            await until(lambda: session.in_use == 1)
            messages.put_nowait(running(PROMPT + text[:3], until=6))
            await until(lambda: session.in_use == 2)
        assert said([await taking]) == text[3:4]
        await until(lambda: session.in_use == 0)
        reply = await target.Verify(a_round(4))
        assert (reply.stale, reply.replayed, said([reply])) == (False, False, text[4:5])
        assert [reply async for reply in replies] == []


async def test_a_run_goes_no_further_than_its_session_was_opened_for() -> None:
    """G9: the limit is the session's own, below the sequence length of the target."""
    async with target_site() as site, raw_stub(site.address) as target:
        await target.OpenSession(opening(max_total_tokens=len(PROMPT) + 5))
        beyond = target.VerifyStream()
        await beyond.write(running(PROMPT, until=6))
        refused = await refusal(beyond)
        assert refused.code == "OUT_OF_RANGE"
        assert refused.message == f"run_until {len(PROMPT) + 6} is above the sequence length {len(PROMPT) + 5}"
        call = target.VerifyStream()
        await call.write(running(PROMPT, until=5))
        assert said(await read(call, 5)) == truth(5)
        call.cancel()


@pytest.mark.parametrize("leave", ["cancel", "done_writing", "close"])
async def test_leaving_frees_the_slot_within_a_step_and_leaves_no_task(leave: str) -> None:
    """G7."""
    async with target_site(toy(SLOW)) as site, raw_stub(site.address) as target:
        tasks = len(asyncio.all_tasks())
        await target.OpenSession(opening())
        call = target.VerifyStream()
        await call.write(running(PROMPT, until=90))
        await read(call, 5)
        if leave == "cancel":
            call.cancel()
        elif leave == "done_writing":
            await call.done_writing()
            while await call.read() is not grpc.aio.EOF:
                pass
        else:
            await target.CloseSession(pb.CloseSessionRequest(session_id="s"))
            assert (await refusal(call)).code == "NOT_FOUND"
        await asyncio.sleep(0.05)
        steps = site.engine.batcher.steps
        await asyncio.sleep(0.05)
        assert site.engine.batcher.steps <= steps + 1
        await target.CloseSession(pb.CloseSessionRequest(session_id="s"))
        await until(lambda: site.free == 4)
        await until(lambda: len(asyncio.all_tasks()) <= tasks)


async def test_a_failover_in_a_run_to_a_target_that_does_not_run_sessions_is_refused_by_name() -> None:
    """No TargetVerifier of ours is one: whether a session runs follows from its rule."""
    async with target_site(toy(SLOW, max_length=512)) as first, target_site(toy(max_length=512)) as other:
        service = other.verifier
        assert service is not None
        filled = service._fill

        async def without_runs(*opened: Any) -> Any:
            reply = await filled(*opened)
            reply.max_unread_tokens = 0
            return reply

        def refuse(key: Any) -> None:
            raise NotAccepting("draining")

        service._fill = without_runs  # type: ignore[method-assign]
        addresses = f"{first.address},{other.address}"
        async with distributed(addresses, "miss=0.2", max_length=512, pipeline=Pipeline.NEVER_WAITING) as (
            generator,
            client,
        ):
            client.pool.current = first.address  # whichever answered first
            request = ids(PROMPT, 400, sampling=SAMPLED, ignore_end_of_sequence=True)
            tokens: list[int] = []
            with pytest.raises(TandemError, match=f"max_unread_tokens: .* {other.address} does not run sessions"):
                async for event in generator.generate(request):
                    tokens += getattr(event, "token_ids", ())
                    if len(tokens) >= 10 and client.endpoint.address == first.address:
                        first.verifier._check_new = refuse  # type: ignore[method-assign]
                        for session in first.verifier.sessions:
                            first.verifier.checkout.drop(session.session_id)
            assert 10 <= len(tokens) < 400 and tokens == truth(len(tokens), SAMPLED)
        await until(lambda: other.free == 4)


async def test_every_message_renews_the_lease() -> None:
    """G5: of a run that pauses too."""
    async with target_site() as site, raw_stub(site.address) as target:
        await target.OpenSession(opening())
        (session,) = site.verifier.sessions
        call = target.VerifyStream()
        await call.write(running(PROMPT, until=3))
        await read(call, 3)
        await until(lambda: not session.in_use)
        before = session.expires
        await call.write(running(PROMPT + truth(3), until=3))
        await until(lambda: session.run.run.messages == 2)
        assert session.expires > before
        call.cancel()


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
