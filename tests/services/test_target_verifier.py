"""OpenSession, Verify, CloseSession over the wire: G2 to G7 of the contract."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
import pytest

from tandem.rpc import wire
from tandem.runners.toy import ToyConfig, toy_digest
from tandem.speculation.types import SamplingParams
from tandem.v1 import target_verifier_pb2 as pb
from tests.gate import Gate
from tests.support import GREEDY, LEASE, SAMPLED, answer, ids, oracle, raw_stub, run, target_site, toy, until

PROMPT = list(b"the prompt, long enough for three chunks of prefill")


def opening(name: str = "s", prefix: Sequence[int] = PROMPT, sampling: SamplingParams = GREEDY, **rest: Any) -> Any:
    return pb.OpenSessionRequest(
        session_id=name, prefix=prefix, prompt_length=1, sampling=wire.sampling_to_wire(sampling), **rest
    )


def verifying(tokens: Sequence[int], draft: Sequence[int] = (), name: str = "s", **rest: Any) -> Any:
    return pb.VerifyRequest(session_id=name, base_length=len(tokens), last_token=tokens[-1], draft_tokens=draft, **rest)


async def code(call: Any) -> str:
    with pytest.raises(grpc.RpcError) as caught:
        await call
    return caught.value.code().name


def test_a_round_commits_the_agreeing_drafts_and_one_token_of_the_targets_own() -> None:
    """G1, G3: the reply alone is enough to follow."""
    truth = list(oracle(PROMPT, SAMPLED, 12))

    async def test() -> None:
        async with target_site() as site, raw_stub(site.address) as target:
            opened = await target.OpenSession(opening(sampling=SAMPLED, report_margins=True))
            assert (opened.committed_length, opened.reused_length) == (len(PROMPT), 0)
            assert opened.max_speculation_length == 5
            assert opened.prefill_seconds > 0
            tokens = list(PROMPT)
            for draft, accepted in (
                (truth[:5], 5),
                ([truth[6], (truth[7] + 1) % 256, truth[8]], 1),
                ([], 0),
                ([(truth[9] + 1) % 256], 0),
            ):
                reply = await target.Verify(verifying(tokens, draft))
                at = len(tokens) - len(PROMPT)
                assert list(reply.token_ids) == truth[at : at + accepted + 1]
                assert reply.accepted == accepted
                assert len(reply.margins) == accepted + 1
                assert min(reply.margins) > 0
                assert not reply.stale and not reply.replayed
                assert reply.server_seconds >= reply.compute_seconds > 0
                tokens += reply.token_ids
                assert reply.committed_length == len(tokens)

    run(test())


def test_a_repeated_round_gets_the_recorded_reply_even_with_other_drafts() -> None:
    """G2, G3: first commit wins."""
    truth = list(oracle(PROMPT, GREEDY, 8))

    async def test() -> None:
        async with target_site() as site, raw_stub(site.address) as target:
            await target.OpenSession(opening())
            first = await target.Verify(verifying(PROMPT, truth[:2]))
            steps = site.engine.batcher.steps
            for draft in (truth[:2], [1, 2, 3, 4, 5], []):
                again = await target.Verify(verifying(PROMPT, draft))
                assert again.replayed and not again.stale
                assert (list(again.token_ids), again.accepted, again.committed_length) == (
                    truth[:3],
                    2,
                    first.committed_length,
                )
            assert site.engine.batcher.steps == steps
            following = await target.Verify(verifying(PROMPT + truth[:3]))
            assert list(following.token_ids) == truth[3:4]

    run(test())


def test_a_stale_round_applies_nothing_and_says_the_committed_length() -> None:
    """G2."""
    truth = list(oracle(PROMPT, GREEDY, 8))

    async def test() -> None:
        async with target_site() as site, raw_stub(site.address) as target:
            await target.OpenSession(opening())
            await target.Verify(verifying(PROMPT, truth[:1]))
            await target.Verify(verifying(PROMPT + truth[:2]))
            for tokens in (PROMPT, PROMPT + truth[:4], PROMPT + truth[:2] + [(truth[2] + 1) % 256], PROMPT[:1]):
                reply = await target.Verify(verifying(tokens, [1, 2]))
                assert reply.stale and not reply.replayed
                assert reply.committed_length == len(PROMPT) + 3
                assert not reply.token_ids
            assert list((await target.Verify(verifying(PROMPT + truth[:3]))).token_ids) == truth[3:4]

    run(test())


def test_two_rounds_at_once_commit_once() -> None:
    """G2: as where gRPC sends a round again while its first copy is still being computed."""
    truth = list(oracle(PROMPT, GREEDY, 8))

    async def test() -> None:
        async with target_site(toy(ToyConfig(step_seconds=0.01))) as site, raw_stub(site.address) as target:
            await target.OpenSession(opening())
            replies = await asyncio.gather(
                target.Verify(verifying(PROMPT, truth[:2])), target.Verify(verifying(PROMPT, truth[:4]))
            )
            assert sorted(reply.replayed for reply in replies) == [False, True]
            assert list(replies[0].token_ids) == list(replies[1].token_ids)
            committed = replies[0].committed_length
            assert list((await target.Verify(verifying(PROMPT + truth[: committed - len(PROMPT)]))).token_ids)

    run(test())


def test_opening_again_resumes_and_reports_what_it_reused() -> None:
    """G4."""
    truth = list(oracle(PROMPT, GREEDY, 8))

    async def test() -> None:
        async with target_site() as site, raw_stub(site.address) as target:
            await target.OpenSession(opening())
            for _ in range(2):
                again = await target.OpenSession(opening())
                assert (again.committed_length, again.reused_length) == (len(PROMPT), len(PROMPT) - 1)
            await target.Verify(verifying(PROMPT, truth[:2]))
            shorter = PROMPT[:20]
            back = await target.OpenSession(opening(prefix=shorter))
            assert (back.committed_length, back.reused_length) == (20, 19)
            expected = list(oracle(shorter, GREEDY, 2))
            assert list((await target.Verify(verifying(shorter, expected[:1]))).token_ids) == expected
            longer = shorter + expected + [7, 8, 9]
            on = await target.OpenSession(opening(prefix=longer))
            assert (on.committed_length, on.reused_length) == (len(longer), 21)
            assert list((await target.Verify(verifying(longer))).token_ids) == list(oracle(longer, GREEDY, 1))
            assert site.free == 3

    run(test())


def test_a_session_rebuilt_on_another_server_goes_on_with_the_same_tokens() -> None:
    truth = list(oracle(PROMPT, SAMPLED, 8))

    async def test() -> None:
        async with target_site() as site, raw_stub(site.address) as target:
            reply = await target.OpenSession(opening(prefix=PROMPT + truth[:5], sampling=SAMPLED))
            assert reply.reused_length == 0
            assert list((await target.Verify(verifying(PROMPT + truth[:5], truth[5:7]))).token_ids) == truth[5:8]

    run(test())


@pytest.mark.parametrize("first", [PROMPT, [5]], ids=["prefilled", "one token"])
def test_another_prefix_or_sampling_under_the_same_id_is_refused_and_the_session_lives_on(first: list[int]) -> None:
    """G4."""

    async def test() -> None:
        async with target_site() as site, raw_stub(site.address) as target:
            await target.OpenSession(opening(prefix=first))
            other = [(first[0] + 1) % 256, *first[1:]]
            assert await code(target.OpenSession(opening(prefix=other))) == "ALREADY_EXISTS"
            assert await code(target.OpenSession(opening(prefix=first, sampling=SAMPLED))) == "ALREADY_EXISTS"
            assert site.free == 3
            assert list((await target.Verify(verifying(first))).token_ids) == list(oracle(first, GREEDY, 1))

    run(test())


def test_closing_frees_the_slot_once_and_the_session_is_gone() -> None:
    async def test() -> None:
        async with target_site(toy(slots=2)) as site, raw_stub(site.address) as target:
            await target.OpenSession(opening())
            assert site.free == 1
            close = pb.CloseSessionRequest(session_id="s")
            assert (await target.CloseSession(close)).closed
            assert not (await target.CloseSession(close)).closed
            assert site.free == 2
            assert await code(target.Verify(verifying(PROMPT))) == "NOT_FOUND"

    run(test())


def test_a_lease_that_runs_out_frees_the_slot_and_the_client_may_come_back() -> None:
    """G5."""
    truth = list(oracle(PROMPT, GREEDY, 2))

    async def test() -> None:
        async with target_site(lease_seconds=0.2) as site, raw_stub(site.address) as target:
            opened = await target.OpenSession(opening())
            assert opened.lease_seconds == pytest.approx(0.2)
            await until(lambda: site.free == 4)
            site.verifier.sessions.lease_seconds = LEASE  # what follows may take its time
            assert await code(target.Verify(verifying(PROMPT + truth[:1]))) == "NOT_FOUND"
            await target.OpenSession(opening(prefix=PROMPT + truth[:1]))
            assert list((await target.Verify(verifying(PROMPT + truth[:1]))).token_ids) == truth[1:]

    run(test())


def test_a_slot_is_never_lent_twice_when_a_session_closes_while_it_prefills() -> None:
    """The first session's later chunks must not be written into the slot of the second, which overtakes it."""
    truth = list(oracle([65], GREEDY, 30))

    async def test() -> None:
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

    run(test())


async def open_when_free(target: Any, request: Any) -> Any:
    while True:
        try:
            return await target.OpenSession(request)
        except grpc.RpcError as error:
            assert error.code().name == "RESOURCE_EXHAUSTED"
            await asyncio.sleep(0.005)


def test_a_round_that_waited_for_a_session_that_was_closed_meanwhile_is_not_found() -> None:
    async def test() -> None:
        gate = Gate()
        async with target_site(gate.guards(toy())) as site, raw_stub(site.address) as target:
            gate.close()
            first = asyncio.ensure_future(target.OpenSession(opening()))
            await until(lambda: site.free == 3)
            waiting = asyncio.ensure_future(target.Verify(verifying(PROMPT)))
            await until(lambda: next(iter(site.verifier.sessions)).in_use == 2)
            await target.CloseSession(pb.CloseSessionRequest(session_id="s"))
            gate.open()
            assert await code(waiting) == "NOT_FOUND"
            await asyncio.gather(first, return_exceptions=True)
            await until(lambda: site.free == 4)

    run(test())


def test_a_second_open_outlives_the_cancelled_first_one() -> None:
    """A client that gave up and asks again under the same id gets a session with a slot of its own."""

    async def test() -> None:
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

    run(test())


def test_a_cancelled_open_leaves_no_slot_behind() -> None:
    """G7."""

    async def test() -> None:
        async with target_site(toy(ToyConfig(step_seconds=0.03))) as site, raw_stub(site.address) as target:
            call = target.OpenSession(opening())
            await until(lambda: site.free == 3)
            call.cancel()
            await until(lambda: site.free == 4)

    run(test())


def test_a_cancelled_verify_commits_nothing_and_the_round_may_be_repeated() -> None:
    """G2, G7: the step ran; what it said is forgotten whole."""
    truth = list(oracle(PROMPT, GREEDY, 3))

    async def test() -> None:
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

    run(test())


def test_sessions_and_plain_generation_share_the_slots() -> None:
    async def test() -> None:
        async with target_site(toy(slots=2)) as site, raw_stub(site.address) as target, site.client() as client:
            await target.OpenSession(opening())
            answers = await asyncio.gather(*(answer(client.generate, ids([65 + i], 8)) for i in range(4)))
            assert [a.token_ids for a in answers] == [oracle([65 + i], GREEDY, 8) for i in range(4)]
            assert list((await target.Verify(verifying(PROMPT))).token_ids) == list(oracle(PROMPT, GREEDY, 1))
            assert site.free == 1

    run(test())


def test_a_drained_server_refuses_new_sessions_and_finishes_running_ones() -> None:
    async def test() -> None:
        async with target_site() as site, raw_stub(site.address) as target:
            await target.OpenSession(opening())
            site.lifecycle.accepting = False
            assert await code(target.OpenSession(opening("new"))) == "UNAVAILABLE"
            assert list((await target.Verify(verifying(PROMPT))).token_ids) == list(oracle(PROMPT, GREEDY, 1))
            assert site.free == 3

    run(test())


def test_two_different_rounds_in_flight_meet_the_fence_one_after_the_other() -> None:
    """G2, G6: the second extends what its sender guessed the first would commit; a wrong guess costs no step."""
    truth = list(oracle(PROMPT, GREEDY, 8))

    async def test() -> None:
        gate = Gate()
        async with target_site(gate.guards(toy())) as site, raw_stub(site.address) as target:
            await target.OpenSession(opening())
            gate.close()
            first = asyncio.ensure_future(target.Verify(verifying(PROMPT, truth[:2])))
            await until(lambda: next(iter(site.verifier.sessions)).in_use == 1)
            right = asyncio.ensure_future(target.Verify(verifying(PROMPT + truth[:3], truth[3:4])))
            await until(lambda: next(iter(site.verifier.sessions)).in_use == 2)
            wrong = asyncio.ensure_future(target.Verify(verifying([*PROMPT, *truth[:2], (truth[2] + 1) % 256])))
            await until(lambda: next(iter(site.verifier.sessions)).in_use == 3)
            steps = site.engine.batcher.steps
            gate.open()
            assert list((await first).token_ids) == truth[:3]
            assert list((await right).token_ids) == truth[3:5]
            assert (await wrong).stale
            assert site.engine.batcher.steps == steps + 2

    run(test())


def test_opening_again_while_a_round_is_computed_waits_for_it_and_its_reply_is_there() -> None:
    """G2, G4: a client that lost its connection in the middle of a round."""
    truth = list(oracle(PROMPT, GREEDY, 4))

    async def test() -> None:
        gate = Gate()
        async with target_site(gate.guards(toy())) as site, raw_stub(site.address) as target:
            await target.OpenSession(opening())
            gate.close()
            first = asyncio.ensure_future(target.Verify(verifying(PROMPT, truth[:2])))
            await until(lambda: next(iter(site.verifier.sessions)).in_use == 1)
            opened = asyncio.ensure_future(target.OpenSession(opening()))
            await until(lambda: next(iter(site.verifier.sessions)).in_use == 2)
            gate.open()
            again = await opened
            assert again.committed_length == len(PROMPT) + 3
            steps = site.engine.batcher.steps
            reply = await target.Verify(verifying(PROMPT, [1, 2, 3]))
            assert reply.replayed and list(reply.token_ids) == truth[:3] == list((await first).token_ids)
            assert site.engine.batcher.steps == steps and site.free == 3

    run(test())


def test_closing_during_a_round_frees_the_slot_after_it_and_the_round_is_answered() -> None:
    """G7."""
    truth = list(oracle(PROMPT, GREEDY, 3))

    async def test() -> None:
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
            assert await code(target.Verify(verifying(PROMPT))) == "NOT_FOUND"

    run(test())


def test_a_full_server_collects_what_ran_out_before_it_refuses() -> None:
    """G5, G6: also where nobody has looked yet."""

    async def test() -> None:
        async with target_site(toy(slots=1)) as site, raw_stub(site.address) as target:
            await target.OpenSession(opening())
            assert await code(target.OpenSession(opening("new"))) == "RESOURCE_EXHAUSTED"
            for session in site.verifier.sessions:
                session.expires = float("-inf")
            assert (await target.OpenSession(opening("new"))).committed_length == len(PROMPT)
            with pytest.raises(grpc.RpcError, match="its lease expired"):
                await target.Verify(verifying(PROMPT))

    run(test())


@pytest.mark.parametrize("drafted", [0, 2])
def test_a_round_may_fill_the_total_that_was_asked_for_and_not_exceed_it_by_one(drafted: int) -> None:
    """G9: the base, what is drafted, and the token of the target's own."""

    async def test() -> None:
        async with target_site() as site, raw_stub(site.address) as target:
            total = len(PROMPT) + drafted + 1
            await target.OpenSession(opening("fits", max_total_tokens=total))
            await target.OpenSession(opening("one less", max_total_tokens=total - 1 if drafted else total))
            assert (await target.Verify(verifying(PROMPT, [1] * drafted, "fits"))).token_ids
            assert await code(target.Verify(verifying(PROMPT, [1] * (drafted + 1), "fits"))) == "OUT_OF_RANGE"
            if drafted:
                assert await code(target.Verify(verifying(PROMPT, [1] * drafted, "one less"))) == "OUT_OF_RANGE"

    run(test())
