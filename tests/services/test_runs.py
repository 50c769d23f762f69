"""Runs over the wire: a target that never waits. G1 to G7 of the contract, its limits, and what it leaves behind."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc
import pytest

from tandem.engine.stepper import MOST_AHEAD
from tandem.rpc.errors import TandemError
from tandem.runners.toy import ToyConfig
from tandem.services.lifecycle import NotAccepting
from tandem.services.verify_runs import MAX_STOP_TOKENS
from tandem.speculation.depth import Pipeline
from tandem.speculation.run_on import MAX_UNREAD
from tandem.speculation.types import Rule
from tandem.v1 import generation_pb2
from tandem.v1 import target_verifier_pb2 as pb
from tests.services.test_target_verifier import PROMPT, opening
from tests.support import (
    GREEDY,
    SAMPLED,
    answer,
    distributed,
    ids,
    oracle,
    raw_stub,
    run,
    target_site,
    toy,
    until,
)

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


async def status(call: Any) -> tuple[str, str]:
    with pytest.raises(grpc.RpcError) as caught:
        while (await call.read()) is not grpc.aio.EOF:
            pass
    return caught.value.code().name, caught.value.details()


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_one_message_makes_the_target_step_on_alone_to_the_limit_and_no_further(sampling: Any) -> None:
    """G1, G3: every step is sent, and is plain decoding's."""

    async def test() -> None:
        async with target_site() as site, raw_stub(site.address) as target:
            opened = await target.OpenSession(opening(sampling=sampling, report_margins=True))
            assert opened.max_unread_tokens == MAX_UNREAD
            before = site.engine.batcher.steps
            call = target.VerifyStream()
            await call.write(running(PROMPT, until=20))
            replies = await read(call, 20)
            assert said(replies) == truth(20, sampling)
            lengths = [reply.committed_length - len(PROMPT) for reply in replies]
            assert lengths == list(range(1, 21))
            assert {(r.drafted, r.messages_read, len(r.margins), r.stale) for r in replies} == {(0, 1, 1, False)}
            await asyncio.sleep(0.02)
            assert site.engine.batcher.steps == before + 20
            await call.write(running(PROMPT + truth(20, sampling), until=25))
            assert said(await read(call, 5)) == truth(25, sampling)[20:]
            call.cancel()
            closed = await target.CloseSession(pb.CloseSessionRequest(session_id="s"))
            assert (closed.steps, closed.committed_length) == (25, len(PROMPT) + 25)
            assert site.free == 4

    run(test())


def test_steps_that_are_known_together_come_in_one_reply_to_a_client_that_takes_several() -> None:
    async def test() -> None:
        async with target_site(toy(ToyConfig(step_seconds=0.001))) as site, raw_stub(site.address) as target:
            counts = []
            for name, several in (("s", False), ("t", True)):
                await target.OpenSession(opening(name, sampling=SAMPLED))
                call = target.VerifyStream()
                await call.write(running(PROMPT, until=100, session_id=name, takes_several=several))
                replies: list[Any] = []
                while sum(1 + len(reply.next_steps) for reply in replies) < 100:
                    replies.append(await call.read())
                steps = [step for reply in replies for step in (reply, *reply.next_steps)]
                assert said(steps) == truth(100, SAMPLED)
                assert [step.committed_length - len(PROMPT) for step in steps] == list(range(1, 101))
                assert not any(step.next_steps for reply in replies for step in reply.next_steps)
                call.cancel()
                await target.CloseSession(pb.CloseSessionRequest(session_id=name))  # so that the other is alone
                counts.append(len(replies))
            assert counts[0] == 100
            assert counts[1] < 60  # read together, at most every 1/60 s once the client has not drafted for 16 steps

    run(test())


def test_a_draft_is_used_however_late_it_comes_and_the_newest_one_counts() -> None:
    text = truth(30)
    wrong = (text[13] + 1) % 256

    async def test() -> None:
        async with target_site() as site, raw_stub(site.address) as target:
            await target.OpenSession(opening())
            call = target.VerifyStream()
            await call.write(running(PROMPT, until=4))
            await read(call, 4)
            await call.write(running(PROMPT + text[:1], text[1:12], until=12))  # three of them are committed already
            late = await read(call, 8)
            assert (late[0].drafted, late[0].accepted) == (5, 5)
            await call.write(running(PROMPT + text[:12], text[12:18], until=12))  # the run pauses, and keeps it
            await call.write(running(PROMPT + text[:12], [text[12], wrong, 7], until=24))
            replies = await read(call, 12)
            assert said([*late, *replies]) == text[4:24]
            assert [(r.drafted, r.accepted) for r in replies[:2]] == [(3, 1), (0, 0)]
            call.cancel()

    run(test())


def test_nonsense_that_arrives_at_any_time_changes_no_token() -> None:
    chance = random.Random(4)

    async def test(sampling: Any) -> None:
        async with target_site(toy(ToyConfig(step_seconds=0.001))) as site, raw_stub(site.address) as target:
            await target.OpenSession(opening(sampling=sampling))
            call, text = target.VerifyStream(), truth(90, sampling)
            await call.write(running(PROMPT, text[:3], until=90))  # of what comes later none may fit in time

            async def disturb() -> None:
                while True:
                    at = chance.randrange(0, 60)
                    known = (PROMPT + text)[: len(PROMPT) + at]
                    right = text[at : at + chance.randrange(8)]
                    draft = [*right, *(chance.randrange(256) for _ in range(chance.randrange(6)))]
                    await call.write(running(known, draft, until=90))
                    await asyncio.sleep(chance.random() * 0.003)

            disturbing = asyncio.create_task(disturb())
            replies = await read(call, 90)
            disturbing.cancel()
            await asyncio.gather(disturbing, return_exceptions=True)
            assert said(replies) == text
            assert any(reply.accepted for reply in replies)
            call.cancel()

    for sampling in (GREEDY, SAMPLED):
        run(test(sampling))


def test_a_client_that_acknowledges_nothing_stops_the_target_and_its_lease_then_ends() -> None:
    """G5."""

    async def test() -> None:
        runner = toy(max_length=1000)
        async with target_site(runner, lease_seconds=0.3) as site, raw_stub(site.address) as target:
            await target.OpenSession(opening())
            call = target.VerifyStream()
            await call.write(running(PROMPT, until=900))
            assert len(said(await read(call, MAX_UNREAD))) == MAX_UNREAD
            assert (await status(call))[0] == "NOT_FOUND"
            await until(lambda: site.free == 4)
            assert site.engine.batcher.steps < MAX_UNREAD + 20

    run(test())


def test_a_stop_token_ends_the_run_at_once() -> None:
    text = truth(40)
    stop = text[10]
    end = text.index(stop) + 1

    async def test() -> None:
        async with target_site() as site, raw_stub(site.address) as target:
            await target.OpenSession(opening())
            call = target.VerifyStream()
            await call.write(running(PROMPT, stop_token_ids=[stop]))
            assert said(await read(call, end)) == text[:end]
            closed = await target.CloseSession(pb.CloseSessionRequest(session_id="s"))
            assert (closed.committed_length, closed.steps) == (len(PROMPT) + end, end)
            assert (await status(call))[0] == "NOT_FOUND"

    run(test())


def test_too_many_stop_tokens_or_one_outside_the_vocabulary_begin_no_run() -> None:
    async def test() -> None:
        async with target_site() as site, raw_stub(site.address) as target:
            await target.OpenSession(opening())
            too_many, outside = [1] * (MAX_STOP_TOKENS + 1), [10**6]
            for stops, why in ((too_many, "257 are above 256"), (outside, "token id 1000000 is outside the vocab")):
                call = target.VerifyStream()
                await call.write(running(PROMPT, stop_token_ids=stops))
                code, details = await status(call)
                assert code == "INVALID_ARGUMENT" and f"stop_token_ids: {why}" in details

    run(test())


@pytest.mark.parametrize(
    ("bad", "code", "says"),
    [
        (running(PROMPT, [258]), "INVALID_ARGUMENT", "draft_tokens: token id 258"),
        (running(PROMPT, [1] * 257), "INVALID_ARGUMENT", "257 tokens"),
        (running(PROMPT, until=10_000), "OUT_OF_RANGE", "above the sequence length"),
        (running(PROMPT, session_id="another"), "INVALID_ARGUMENT", "a run has one session"),
        (pb.VerifyRequest(session_id="s", base_length=3, last_token=1), "INVALID_ARGUMENT", "the stream is a run"),
    ],
)
def test_an_invalid_message_ends_the_run_and_harms_no_session(bad: Any, code: str, says: str) -> None:
    """G9."""

    async def test() -> None:
        async with target_site() as site, raw_stub(site.address) as target:
            await target.OpenSession(opening())
            call = target.VerifyStream()
            await call.write(running(PROMPT, until=3))
            assert said(await read(call, 3)) == truth(3)
            await call.write(bad)
            got, message = await status(call)
            assert (got, says in message) == (code, True), message
            again = target.VerifyStream()
            await again.write(running(PROMPT + truth(3), until=6))
            assert said(await read(again, 3)) == truth(6)[3:]
            again.cancel()

    run(test())


def test_the_first_message_is_fenced_like_a_round() -> None:
    """G2: a lost step is replayed; on other tokens nothing is computed."""
    text = truth(9)

    async def test() -> None:
        async with target_site() as site, raw_stub(site.address) as target:
            await target.OpenSession(opening())
            await target.Verify(
                pb.VerifyRequest(session_id="s", base_length=len(PROMPT), last_token=PROMPT[-1], draft_tokens=text[:3])
            )
            steps = site.engine.batcher.steps
            stale = target.VerifyStream()
            await stale.write(running([*PROMPT, 1]))
            reply = await stale.read()
            assert (reply.stale, reply.committed_length) == (True, len(PROMPT) + 4)
            assert await stale.read() is grpc.aio.EOF
            assert site.engine.batcher.steps == steps
            call = target.VerifyStream()
            await call.write(running(PROMPT, text, until=9))
            replies = await read(call, 9)
            assert [reply.replayed for reply in replies] == [True, False]
            assert said(replies) == text
            call.cancel()

    run(test())


def test_what_else_happens_to_the_session_ends_its_run() -> None:
    """G6: one at a time. An opening, a round of another call and a close all end it, and the next run goes on."""
    text = truth(9)

    async def test() -> None:
        async with target_site() as site, raw_stub(site.address) as target:
            await target.OpenSession(opening())
            for what in ("opening", "round", "run"):
                call = target.VerifyStream()
                await call.write(running(PROMPT, until=3))
                assert said(await read(call, 3)) == text[:3]
                if what == "opening":
                    await target.OpenSession(opening(prefix=PROMPT + text[:3]))
                elif what == "round":
                    await target.Verify(
                        pb.VerifyRequest(session_id="s", base_length=len(PROMPT) + 3, last_token=text[2])
                    )
                else:
                    other = target.VerifyStream()
                    await other.write(running(PROMPT + text[:3], until=4))
                    assert said(await read(other, 1)) == text[3:4]
                    other.cancel()
                assert await call.read() is grpc.aio.EOF
                await target.CloseSession(pb.CloseSessionRequest(session_id="s"))
                await until(lambda: site.free == 4)
                await target.OpenSession(opening("s2"))
                await target.CloseSession(pb.CloseSessionRequest(session_id="s2"))
                site.verifier.sessions._ended.clear()
                await target.OpenSession(opening())

    run(test())


def test_a_step_that_waits_for_its_session_while_another_call_takes_it_is_not_made() -> None:
    """G6: tokens that a superseded run committed would make the rounds of the call that took the session stale."""
    text = truth(9)

    def a_round(done: int) -> Any:
        return pb.VerifyRequest(session_id="s", base_length=len(PROMPT) + done, last_token=text[done - 1])

    async def test() -> None:
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

    run(test())


def test_a_run_goes_no_further_than_its_session_was_opened_for() -> None:
    """G9: the limit is the session's own, below the sequence length of the target."""

    async def test() -> None:
        async with target_site() as site, raw_stub(site.address) as target:
            await target.OpenSession(opening(max_total_tokens=len(PROMPT) + 5))
            beyond = target.VerifyStream()
            await beyond.write(running(PROMPT, until=6))
            assert await status(beyond) == (
                "OUT_OF_RANGE",
                f"run_until {len(PROMPT) + 6} is above the sequence length {len(PROMPT) + 5}",
            )
            call = target.VerifyStream()
            await call.write(running(PROMPT, until=5))
            assert said(await read(call, 5)) == truth(5)
            call.cancel()

    run(test())


@pytest.mark.parametrize("leave", ["cancel", "done_writing", "close"])
def test_leaving_frees_the_slot_within_a_step_and_leaves_no_task(leave: str) -> None:
    """G7."""

    async def test() -> None:
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
                assert (await status(call))[0] == "NOT_FOUND"
            await asyncio.sleep(0.05)
            steps = site.engine.batcher.steps
            await asyncio.sleep(0.05)
            assert site.engine.batcher.steps <= steps + 1
            await target.CloseSession(pb.CloseSessionRequest(session_id="s"))
            await until(lambda: site.free == 4)
            await until(lambda: len(asyncio.all_tasks()) <= tasks)

    run(test())


def test_the_rejection_rule_does_not_run_and_says_so() -> None:
    async def test() -> None:
        async with target_site() as site, raw_stub(site.address) as target:
            opened = await target.OpenSession(opening(rule=generation_pb2.VERIFICATION_RULE_REJECTION))
            assert opened.max_unread_tokens == 0
            call = target.VerifyStream()
            await call.write(running(PROMPT))
            code, message = await status(call)
            assert code == "INVALID_ARGUMENT" and "rejection" in message
            async with distributed(site.address, pipeline=Pipeline.NEVER_WAITING) as (generator, _):
                got = await answer(generator.generate, ids(PROMPT, 10, sampling=SAMPLED, rule=Rule.REJECTION))
                assert len(got.token_ids) == 10 and got.completion.stats.run_steps == 0

    run(test())


def test_a_target_that_does_not_run_sessions_gets_rounds_and_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.services.target_verifier.MAX_UNREAD", 0)

    async def test() -> None:
        async with target_site() as site, distributed(site.address, pipeline=Pipeline.NEVER_WAITING) as (generator, _):
            got = await answer(generator.generate, ids(PROMPT, 20, sampling=SAMPLED))
            assert got.token_ids == oracle(PROMPT, SAMPLED, 20)
            assert (got.completion.stats.run_steps, got.completion.stats.stale_drafts >= 0) == (0, True)

    run(test())


def test_a_failover_in_a_run_to_a_target_that_does_not_run_sessions_is_refused_by_name() -> None:
    """No TargetVerifier of ours is one: whether a session runs follows from its rule."""

    async def test() -> None:
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
                                await first.verifier.checkout.drop(session.session_id)
                assert 10 <= len(tokens) < 400 and tokens == truth(len(tokens), SAMPLED)
            await until(lambda: other.free == 4)

    run(test())


def test_the_steps_after_a_stop_string_are_counted_as_waste() -> None:
    async def test() -> None:
        async with (
            target_site(toy(SLOW)) as site,
            distributed(site.address, "salt=9", pipeline=Pipeline.NEVER_WAITING) as (generator, _),
        ):
            text = bytes(truth(60, SAMPLED))
            at = next(i for i in range(20, 50) if 32 < text[i] < 127)
            got = await answer(
                generator.generate,
                ids(PROMPT, 60, sampling=SAMPLED, stop_strings=(chr(text[at]),), ignore_end_of_sequence=True),
            )
            made = site.engine.batcher.steps - 4  # of the prompt
            stats = got.completion.stats
            told = stats.run_steps + stats.wasted_steps
            assert made - MOST_AHEAD <= told <= made + 1  # nobody asked for the device's last; one was under way
            assert stats.wasted_steps > 0
            assert len(got.token_ids) <= at + 1

    run(test())


def test_a_step_verifies_no_more_drafts_than_the_runner_can() -> None:
    text = truth(30)

    async def test() -> None:
        async with target_site() as site, raw_stub(site.address) as target:
            await target.OpenSession(opening())
            call = target.VerifyStream()
            await call.write(running(PROMPT, text[:25], until=24, max_step_drafts=1000))
            replies = await read(call, 24)
            assert said(replies) == text[:24]
            assert [reply.drafted for reply in replies] == [5, 5, 5, 5]
            call.cancel()

    run(test())


def test_every_message_renews_the_lease() -> None:
    """G5: of a run that pauses too."""

    async def test() -> None:
        async with target_site() as site, raw_stub(site.address) as target:
            await target.OpenSession(opening())
            (session,) = site.verifier.sessions
            call = target.VerifyStream()
            await call.write(running(PROMPT, until=3))
            await read(call, 3)
            await until(lambda: not session.in_use)
            before = session.expires
            await call.write(running(PROMPT + truth(3), until=3))
            await until(lambda: session.resources.run.run.messages == 2)
            assert session.expires > before
            call.cancel()

    run(test())
