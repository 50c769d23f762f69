"""Races of OpenSession, Verify and CloseSession; streams of rounds: bounded, in order, and nothing left behind."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from tandem.services.server_duplex import MAX_AHEAD, answered_in_order
from tandem.v1 import target_verifier_pb2 as pb
from tests.gate import Gate
from tests.support import GREEDY, PROMPT, opening, oracle, raw_stub, refusal, target_site, toy, until, verifying
from tests.toy import ToyConfig, toy_digest


async def test_a_slot_is_never_lent_twice_when_a_session_closes_while_it_prefills() -> None:
    """The first session's later chunks must not be written into the slot of the second, which overtakes it."""
    truth = list(oracle([65], GREEDY, 30))
    runner = toy(ToyConfig(step_seconds=0.002), slots=1, chunk=1)
    async with target_site(runner) as site, raw_stub(site.address) as target:
        first = asyncio.ensure_future(target.OpenSession(opening("first", [1] * 60)))
        await until(lambda: runner.digests[0, 0] == toy_digest((1,)))
        assert (await target.CloseSession(pb.CloseSessionRequest(session_id="first"))).closed
        await open_when_free(target, opening("second", [65]))
        for at in range(0, 30, 6):
            reply = await target.Verify(verifying([65, *truth[:at]], truth[at : at + 5], "second"))
            assert list(reply.token_ids) == truth[at : at + 6]
        await asyncio.gather(first, return_exceptions=True)
        await target.CloseSession(pb.CloseSessionRequest(session_id="second"))
        assert site.free == 1


async def open_when_free(target: Any, request: Any) -> Any:
    while True:
        try:
            return await target.OpenSession(request)
        except grpc.RpcError as error:
            assert error.code().name == "RESOURCE_EXHAUSTED"
            await asyncio.sleep(0.005)


async def test_a_round_that_waited_for_a_session_that_was_closed_meanwhile_is_not_found() -> None:
    gate = Gate()
    async with target_site(gate.guards(toy())) as site, raw_stub(site.address) as target:
        gate.close()
        first = asyncio.ensure_future(target.OpenSession(opening()))
        await until(lambda: site.free == 3)
        waiting = asyncio.ensure_future(target.Verify(verifying(PROMPT)))
        await until(lambda: next(iter(site.verifier.sessions)).in_use == 2)
        await target.CloseSession(pb.CloseSessionRequest(session_id="s"))
        gate.open()
        assert (await refusal(waiting)).code == "NOT_FOUND"
        await asyncio.gather(first, return_exceptions=True)
        await until(lambda: site.free == 4)


async def test_a_second_open_outlives_the_cancelled_first_one() -> None:
    """A client that gave up and asks again under the same id gets a session with a slot of its own."""
    gate = Gate()
    async with target_site(gate.guards(toy(slots=2))) as site, raw_stub(site.address) as target:
        gate.close()
        first = target.OpenSession(opening())
        await until(lambda: site.free == 1)
        second = asyncio.ensure_future(target.OpenSession(opening()))
        await until(lambda: next(iter(site.verifier.sessions)).in_use == 2)
        first.cancel()
        await until(lambda: next(iter(site.verifier.sessions)).in_use == 1)  # the server has heard of it
        gate.open()
        assert (await second).committed_length == len(PROMPT)
        assert site.free == 1
        assert list((await target.Verify(verifying(PROMPT))).token_ids) == list(oracle(PROMPT, GREEDY, 1))
        await target.CloseSession(pb.CloseSessionRequest(session_id="s"))
        assert site.free == 2


async def test_a_cancelled_verify_commits_nothing_and_the_round_may_be_repeated() -> None:
    """G2, G7: the step ran; what it said is forgotten whole."""
    truth = list(oracle(PROMPT, GREEDY, 3))
    gate = Gate()
    async with target_site(gate.guards(toy(chunk=64))) as site, raw_stub(site.address) as target:
        await target.OpenSession(opening())
        gate.close()
        call = target.Verify(verifying(PROMPT, [1, 2, 3]))
        await until(lambda: gate.held > 0)
        call.cancel()
        await until(lambda: next(iter(site.verifier.sessions)).in_use == 0)  # the server has heard of it
        gate.open()
        reply = await target.Verify(verifying(PROMPT, truth[:2]))
        assert list(reply.token_ids) == truth


async def test_closing_during_a_round_frees_the_slot_after_it_and_the_round_is_answered() -> None:
    """G7."""
    truth = list(oracle(PROMPT, GREEDY, 3))
    gate = Gate()
    async with target_site(gate.guards(toy(slots=1))) as site, raw_stub(site.address) as target:
        await target.OpenSession(opening())
        gate.close()
        steps = site.engine.batcher.steps
        computing = asyncio.ensure_future(target.Verify(verifying(PROMPT, truth[:2])))
        await until(lambda: next(iter(site.verifier.sessions)).in_use == 1)
        assert (await target.CloseSession(pb.CloseSessionRequest(session_id="s"))).closed
        assert site.free == 0 and not computing.done()
        gate.open()
        assert list((await computing).token_ids) == truth
        assert site.free == 1 and site.engine.batcher.steps == steps + 1
        assert (await refusal(target.Verify(verifying(PROMPT)))).code == "NOT_FOUND"


async def test_a_full_server_collects_what_ran_out_before_it_refuses() -> None:
    """G5, G6: also where nobody has looked yet."""
    async with target_site(toy(slots=1)) as site, raw_stub(site.address) as target:
        await target.OpenSession(opening())
        assert (await refusal(target.OpenSession(opening("new")))).code == "RESOURCE_EXHAUSTED"
        for session in site.verifier.sessions:
            session.expires = float("-inf")
        assert (await target.OpenSession(opening("new"))).committed_length == len(PROMPT)
        with pytest.raises(grpc.RpcError, match="its lease expired"):
            await target.Verify(verifying(PROMPT))


@pytest.mark.parametrize("drafted", [0, 2])
async def test_a_round_may_fill_the_total_that_was_asked_for_and_not_exceed_it_by_one(drafted: int) -> None:
    """G9: the base, what is drafted, and the token of the target's own."""
    async with target_site() as site, raw_stub(site.address) as target:
        total = len(PROMPT) + drafted + 1
        await target.OpenSession(opening("fits", max_total_tokens=total))
        await target.OpenSession(opening("one less", max_total_tokens=total - 1 if drafted else total))
        assert (await target.Verify(verifying(PROMPT, [1] * drafted, "fits"))).token_ids
        assert (await refusal(target.Verify(verifying(PROMPT, [1] * (drafted + 1), "fits")))).code == "OUT_OF_RANGE"
        if drafted:
            assert (await refusal(target.Verify(verifying(PROMPT, [1] * drafted, "one less")))).code == "OUT_OF_RANGE"


async def test_reading_ahead_is_bounded_and_goes_on_while_a_round_is_verified() -> None:
    read: list[int] = []
    release = asyncio.Event()

    async def requests() -> AsyncIterator[int]:
        for i in range(100):
            read.append(i)
            yield i

    async def slow(request: int, arrived: float) -> int:
        await release.wait()
        return request

    replies = answered_in_order(requests(), slow, idle_seconds=60)
    first = asyncio.create_task(anext(replies))
    await until(lambda: len(read) >= MAX_AHEAD + 2)
    for _ in range(100):
        await asyncio.sleep(0)
    assert len(read) == MAX_AHEAD + 2  # one is verified, one waits for room
    release.set()
    assert await first == 0
    assert [reply async for reply in replies] == list(range(1, 100))
    reading = [t for t in asyncio.all_tasks() if t.get_name() == "read stream"]
    assert not reading


def objects() -> int:
    """Counts live objects except timers and their contexts, because asyncio keeps up to a hundred cancelled timers."""
    gc.collect()
    return sum(
        type(each).__name__ not in ("TimerHandle", "Context", "hamt", "hamt_bitmap_node") for each in gc.get_objects()
    )


async def test_streams_that_are_abandoned_leave_no_object_behind() -> None:
    """Counted: what stays resident after them is the allocator's, free for the next."""
    async with target_site() as site, raw_stub(site.address) as target:
        await target.OpenSession(opening())
        tasks, counted = len(asyncio.all_tasks()), list[int]()
        for _ in range(4):
            calls = [target.VerifyStream() for _ in range(100)]
            await asyncio.gather(*(call.write(verifying(PROMPT)) for call in calls[::2]), return_exceptions=True)
            for call in calls:
                call.cancel()
            del calls, call
            await until(lambda: len(asyncio.all_tasks()) <= tasks + 1 and not next(iter(site.verifier.sessions)).in_use)
            counted.append(objects())
        assert counted[-1] - counted[1] < 100, f"{counted} objects, after 100 streams more each time"
