"""Runs over the wire beyond the conformance cases: batched steps, failover, waste, leases."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc
import pytest

from tandem.rpc.received_errors import TandemError
from tandem.services.lifecycle import NotAccepting
from tandem.speculation.verification_mode import Pipeline
from tandem.v1 import target_verifier_pb2 as pb
from tests.support import (
    GREEDY,
    PROMPT,
    SAMPLED,
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

        async def without_runs(session: Any) -> Any:
            reply = await filled(session)
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
