"""Cases of the session protocol: OpenSession, Verify or VerifyStream, CloseSession, spoken directly."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.rpc import wire
from tandem.speculation.types import SamplingParams
from tandem.v1 import target_verifier_pb2 as pb
from tests.conformance.bench import Bench, Rounds
from tests.support import HANG, Refusal, until
from tests.support import refusal as refused

GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=0.9, top_k=40, top_p=0.95, seed=11)


@dataclass
class Open:
    """An open session, what the target will say in it, and a way to send rounds."""

    bench: Bench
    rounds: Rounds
    session_id: str
    prompt: list[int]
    truth: list[int]

    def opening(self, prefix: Sequence[int] | None = None, **rest: Any) -> pb.OpenSessionRequest:
        fields = {"prompt_length": len(self.prompt), "sampling": wire.sampling_to_wire(GREEDY)} | rest
        return pb.OpenSessionRequest(session_id=self.session_id, prefix=prefix or self.prompt, **fields)

    def round(self, committed: int, draft: Sequence[int] = (), **rest: Any) -> pb.VerifyRequest:
        """A round after `committed` tokens of the truth."""
        known = [*self.prompt, *self.truth[:committed]]
        fields = {"base_length": len(known), "last_token": known[-1], "draft_tokens": draft} | rest
        return pb.VerifyRequest(**({"session_id": self.session_id} | fields))

    def wrong(self, at: int) -> int:
        return (self.truth[at] + 1) % 250


@contextlib.asynccontextmanager
async def opened(bench: Bench, sampling: SamplingParams = GREEDY, number: int = 0) -> AsyncIterator[Open]:
    prompt = bench.prompt(number)
    truth = await bench.expected(prompt, sampling, 20)
    async with bench.rounds() as rounds:
        session = Open(bench, rounds, bench.session_id(), prompt, truth)
        await bench.stub.OpenSession(session.opening(sampling=wire.sampling_to_wire(sampling)), timeout=HANG)
        try:
            yield session
        finally:
            await _close(bench, session.session_id)


async def _close(bench: Bench, session_id: str) -> bool:
    reply = await bench.stub.CloseSession(pb.CloseSessionRequest(session_id=session_id), timeout=HANG)
    return bool(reply.closed)


async def open_says_length_and_lease(bench: Bench) -> None:
    """Opening answers with the committed length, the lease and the most draft tokens of a round."""
    async with opened(bench) as session:
        reply = await bench.stub.OpenSession(session.opening())
        assert reply.committed_length == len(session.prompt)
        assert reply.lease_seconds > 0
        assert reply.max_speculation_length == bench.info.max_speculation_length


async def rounds_commit_the_targets_own(bench: Bench) -> None:
    """Accepted drafts and one token of the target's own, whatever was drafted; greedy and sampled."""
    for sampling in (GREEDY, SAMPLED):
        async with opened(bench, sampling) as session:
            truth, done = session.truth, 0
            for draft, accepted in (
                (truth[:3], 3),
                ([truth[4], session.wrong(5)], 1),
                ([], 0),
                ([session.wrong(7)], 0),
            ):
                reply = await session.rounds.send(session.round(done, draft))
                assert not reply.stale and not reply.replayed
                assert list(reply.token_ids) == truth[done : done + accepted + 1], "not the target's own tokens"
                assert reply.accepted == accepted
                done += accepted + 1
                assert reply.committed_length == len(session.prompt) + done


async def lost_reply_is_replayed(bench: Bench) -> None:
    """A round that is sent again, with other drafts too, gets the recorded reply; the client can follow it."""
    async with opened(bench) as session:
        truth = session.truth
        first = await session.rounds.send(session.round(0, truth[:2]))
        for draft in (truth[:2], [session.wrong(0)], [], truth[:4]):
            again = await session.rounds.send(session.round(0, draft))
            assert again.replayed and not again.stale, "a repeated round was not replayed"
            assert (list(again.token_ids), again.accepted) == (list(first.token_ids), first.accepted)
            assert again.committed_length == first.committed_length
        following = await session.rounds.send(session.round(3))
        assert list(following.token_ids) == truth[3:4]


async def stale_round_applies_nothing(bench: Bench) -> None:
    """A round that does not extend the committed tokens is stale, says their length, and changes nothing."""
    async with opened(bench) as session:
        truth, start = session.truth, len(session.prompt)
        await session.rounds.send(session.round(0, truth[:1]))
        await session.rounds.send(session.round(2))
        for stale in (
            session.round(0, truth[:2]),  # two rounds back
            session.round(5),  # ahead
            session.round(3, last_token=session.wrong(2)),  # another last token
            session.round(2, last_token=session.wrong(1)),  # the round before, of another text
            session.round(0, base_length=0),
        ):
            reply = await session.rounds.send(stale)
            assert reply.stale and not reply.token_ids and not reply.replayed, "a stale round was applied"
            assert reply.committed_length == start + 3
        assert list((await session.rounds.send(session.round(3))).token_ids) == truth[3:4]


async def two_rounds_at_once_commit_once(bench: Bench) -> None:
    """Two rounds at one base, at once, over two connections: one is applied, the other gets its reply."""
    async with opened(bench) as session, bench.rounds() as other:
        replies = await asyncio.gather(
            session.rounds.send(session.round(0, session.truth[:2])), other.send(session.round(0, session.truth[:3]))
        )
        assert sorted(reply.replayed for reply in replies) == [False, True]
        assert list(replies[0].token_ids) == list(replies[1].token_ids)


async def k_zero_round(bench: Bench) -> None:
    """Rounds without drafts are plain decoding, one token each."""
    async with opened(bench) as session:
        for done in range(4):
            reply = await session.rounds.send(session.round(done))
            assert (list(reply.token_ids), reply.accepted) == (session.truth[done : done + 1], 0)


async def reopen_resumes_and_rebuilds(bench: Bench) -> None:
    """Opening again with what is committed resumes; after it was closed, another id rebuilds it; same tokens."""
    async with opened(bench) as session:
        await session.rounds.send(session.round(0, session.truth[:2]))
        known = [*session.prompt, *session.truth[:3]]
        resumed = await bench.stub.OpenSession(session.opening(known))
        assert resumed.committed_length == len(known) and resumed.reused_length > 0
        assert list((await session.rounds.send(session.round(3))).token_ids) == session.truth[3:4]
        assert await _close(bench, session.session_id)
        known = [*session.prompt, *session.truth[:4]]
        refusal = await refused(bench.stub.OpenSession(session.opening(known)))
        assert refusal.code == "ALREADY_EXISTS", refusal
        session.session_id = bench.session_id()
        rebuilt = await bench.stub.OpenSession(session.opening(known))
        assert rebuilt.committed_length == len(known)
        assert list((await session.rounds.send(session.round(4, session.truth[4:6]))).token_ids) == session.truth[4:7]


async def reopen_with_other_prefix_is_refused(bench: Bench) -> None:
    """Another prefix, or other sampling, under an open id: ALREADY_EXISTS; the session goes on unharmed."""
    async with opened(bench) as session:
        other = [*session.prompt[:-1], (session.prompt[-1] + 1) % 250]
        for change in ({"prefix": other}, {"sampling": wire.sampling_to_wire(SAMPLED)}):
            refusal = await refused(bench.stub.OpenSession(session.opening(**change)))
            assert refusal.code == "ALREADY_EXISTS", refusal
        assert list((await session.rounds.send(session.round(0))).token_ids) == session.truth[:1]


async def adapter_lasts_as_long_as_the_session(bench: Bench) -> None:
    """An adapter is for the life of a session, and stated by its revision; opened again with another, it is refused."""
    first, second = bench.adapters()[:2]
    prompt, name = bench.prompt(), bench.session_id()
    session = Open(bench, bench.rounds(), name, prompt, await bench.expected(prompt, GREEDY, 4, first))
    try:
        for _ in range(2):
            assert (await bench.stub.OpenSession(session.opening(adapter=first), timeout=HANG)).adapter_revision
        async with session.rounds as rounds:
            reply = await rounds.send(session.round(0, session.truth[:2]))
            assert (list(reply.token_ids), reply.accepted) == (session.truth[:3], 2)
        for other in (second, ""):
            refusal = await refused(bench.stub.OpenSession(session.opening(adapter=other), timeout=HANG))
            assert (refusal.code, refusal.reason) == ("ALREADY_EXISTS", "SESSION_CONFLICT"), refusal
    finally:
        await _close(bench, name)


async def expired_session_is_not_found(bench: Bench) -> None:
    """After its lease a session is NOT_FOUND and its slot free; opened again with its tokens it goes on."""
    assert bench.inside and bench.inside.target
    async with opened(bench) as session:
        with contextlib.suppress(Refusal):  # a busy machine may need more than the lease to come here
            await session.rounds.send(session.round(0))
        await bench.inside.lease_runs_out()
        await bench.inside.all_free()
        refusal = await session.rounds.refused(session.round(1))
        assert (refusal.code, refusal.reason) == ("NOT_FOUND", "SESSION_EXPIRED"), refusal
        await bench.stub.OpenSession(session.opening([*session.prompt, *session.truth[:1]]))
        assert list((await session.rounds.send(session.round(1))).token_ids) == session.truth[1:2]


async def unknown_session_is_not_found(bench: Bench) -> None:
    """A round of a session that was never opened is NOT_FOUND; closing it says that it was not open."""
    async with bench.rounds() as rounds:
        refusal = await rounds.refused(pb.VerifyRequest(session_id="nobody", base_length=1, last_token=1))
        assert (refusal.code, refusal.reason) == ("NOT_FOUND", "SESSION_NOT_FOUND"), refusal
    assert not await _close(bench, "nobody")


async def full_server_refuses_with_retry_info(bench: Bench) -> None:
    """Without a free slot an open is RESOURCE_EXHAUSTED with a delay; those admitted go on; a close makes room."""
    sessions: list[str] = []
    try:
        while True:
            name = bench.session_id()
            opening = pb.OpenSessionRequest(session_id=name, prefix=bench.prompt(), prompt_length=1)
            try:
                await _open(bench, opening)
            except Refusal as refusal:
                assert (refusal.code, refusal.reason) == ("RESOURCE_EXHAUSTED", "NO_SLOT"), refusal
                assert refusal.retry_seconds is not None and refusal.retry_seconds > 0, "no RetryInfo"
                break
            sessions.append(name)
            assert len(sessions) <= bench.info.kv_slots, "more sessions than slots"
        assert len(sessions) == bench.info.kv_slots, "a slot is missing"
        truth = await bench.expected(bench.prompt(), GREEDY, 1) if bench.combination.runner == "toy" else None
        async with bench.rounds() as rounds:
            for name in sessions:
                last = bench.prompt()[-1]
                reply = await rounds.send(pb.VerifyRequest(session_id=name, base_length=12, last_token=last))
                assert truth is None or list(reply.token_ids) == truth
        assert await _close(bench, sessions.pop())
        await _open(bench, opening)
        sessions.append(opening.session_id)
    finally:
        for name in sessions:
            await _close(bench, name)


async def _open(bench: Bench, opening: pb.OpenSessionRequest) -> Any:
    import grpc

    try:
        return await bench.stub.OpenSession(opening, timeout=HANG)
    except grpc.RpcError as error:
        raise Refusal(error) from None


async def broken_connection_keeps_the_session(bench: Bench) -> None:
    """A connection that breaks ends no session: until its lease runs out, rounds over another one go on."""
    async with opened(bench) as session:
        await session.rounds.send(session.round(0))
        session.rounds.leave()
        assert list((await session.rounds.send(session.round(1))).token_ids) == session.truth[1:2]


async def cancelled_open_frees_slot(bench: Bench) -> None:
    """Opens that are cancelled while their prefix is processed leave no slot behind."""
    assert bench.inside and bench.inside.target
    free = bench.inside.target.free
    long = bench.prompt(length=bench.info.max_sequence_length - 10)
    for _ in range(bench.info.kv_slots + 1):
        call = bench.stub.OpenSession(
            pb.OpenSessionRequest(session_id=bench.session_id(), prefix=long, prompt_length=1)
        )
        await until(lambda: bench.inside.target.free < free)
        call.cancel()
        await until(lambda: bench.inside.target.free == free)


async def close_frees_slot_once(bench: Bench) -> None:
    """Closing says whether it was open, frees its slot, and more sessions than slots can follow one another."""
    for _ in range(bench.info.kv_slots + 1):
        name = bench.session_id()
        await _open(bench, pb.OpenSessionRequest(session_id=name, prefix=bench.prompt(), prompt_length=1))
        assert await _close(bench, name)
        assert not await _close(bench, name)


async def tokenizer_mismatch(bench: Bench) -> None:
    """A client of another tokenizer is refused before anything is computed."""
    opening = pb.OpenSessionRequest(
        session_id=bench.session_id(), prefix=bench.prompt(), prompt_length=1, tokenizer_sha256="0" * 64
    )
    refusal = await refused(bench.stub.OpenSession(opening))
    assert (refusal.code, refusal.reason) == ("FAILED_PRECONDITION", "TOKENIZER_MISMATCH"), refusal


async def bad_open_fields(bench: Bench) -> None:
    """Each bad field of an open is INVALID_ARGUMENT and named; a prefix too long is OUT_OF_RANGE."""
    vocabulary, longest = bench.info.vocab_size, bench.info.max_sequence_length
    for field, change in (
        ("session_id", {"session_id": ""}),
        ("session_id", {"session_id": "x" * 129}),
        ("prefix", {"prefix": []}),
        ("prefix", {"prefix": [1, vocabulary]}),
        ("prompt_length", {"prompt_length": 0}),
        ("prompt_length", {"prompt_length": 13}),
        ("temperature", {"sampling": {"temperature": float("nan")}}),
        ("top_p", {"sampling": {"top_p": 0.0}}),
        ("rule", {"rule": 77}),
    ):
        fields: dict[str, Any] = {"session_id": bench.session_id(), "prefix": bench.prompt(), "prompt_length": 1}
        refusal = await refused(bench.stub.OpenSession(pb.OpenSessionRequest(**(fields | change))))
        assert (refusal.code, refusal.field) == ("INVALID_ARGUMENT", field), f"{change}: {refusal}"
    too_long = pb.OpenSessionRequest(session_id=bench.session_id(), prefix=[1] * longest, prompt_length=1)
    refusal = await refused(bench.stub.OpenSession(too_long))
    assert (refusal.code, refusal.reason) == ("OUT_OF_RANGE", "SEQUENCE_TOO_LONG"), refusal


async def bad_round_fields(bench: Bench) -> None:
    """Each bad field of a round is INVALID_ARGUMENT and named, and the session goes on."""
    vocabulary, most = bench.info.vocab_size, bench.info.max_speculation_length
    async with opened(bench) as session:
        for field, request in (
            ("draft_tokens", session.round(0, [1] * (most + 1))),
            ("draft_tokens", session.round(0, [1, vocabulary])),
            ("last_token", session.round(0, last_token=vocabulary)),
            ("distributions", session.round(0, [1], distributions=[{"token_ids": [1], "weights": [1.0]}])),
        ):
            refusal = await session.rounds.refused(request)
            assert (refusal.code, refusal.field) == ("INVALID_ARGUMENT", field), refusal
        assert list((await session.rounds.send(session.round(0))).token_ids) == session.truth[:1]
