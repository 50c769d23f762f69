"""Cases of runs: sessions whose target never waits for a draft, spoken directly over VerifyStream."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc

from tandem.rpc import wire
from tandem.rpc.client_duplex import StreamStatus
from tandem.v1 import generation_pb2
from tandem.v1 import target_verifier_pb2 as pb
from tests.conformance.bench import Bench, LeftOut
from tests.conformance.sessions import GREEDY, SAMPLED, Open, opened
from tests.support import HANG, Refusal

PAUSE = 0.2
"""Seconds in which a run that does not pause makes a step."""
REJECTION = generation_pb2.VERIFICATION_RULE_REJECTION


class Run:
    """One stream that is a run of an open session."""

    def __init__(self, session: Open) -> None:
        self._session = session
        self._stream: Any = session.bench.stub.VerifyStream(timeout=HANG)
        self._status = StreamStatus(self._stream)
        self._reading: asyncio.Task[Any] | None = None

    async def send(self, committed: int, until: int, draft: Sequence[int] = (), **rest: Any) -> None:
        """A message after `committed` tokens of the truth, which lets the run go on until it has `until`."""
        fields = {"run_until": len(self._session.prompt) + until, "max_step_drafts": 3} | rest
        await self._stream.write(self._session.round(committed, draft, **fields))

    async def read(self, count: int) -> list[Any]:
        """The next replies, until they hold `count` tokens."""
        replies: list[Any] = []
        while sum(len(reply.token_ids) for reply in replies) < count:
            replies.append(await self._reply())
            assert replies[-1] is not grpc.aio.EOF and not replies[-1].stale, f"the run ended after {replies}"
        return replies

    async def _reply(self) -> Any:
        reading, self._reading = self._reading or asyncio.create_task(self._stream.read()), None
        try:
            return await reading
        except grpc.RpcError as error:
            raise Refusal(self._status.error(error)) from None

    async def pauses(self) -> None:
        """Looks a little while for a step, of which none may come."""
        self._reading = asyncio.create_task(self._stream.read())
        await asyncio.wait({self._reading}, timeout=PAUSE)
        assert not self._reading.done(), f"the run goes on: {self._reading.result()}"

    async def stale(self) -> Any:
        """The reply to a first message that is stale, which ends the stream."""
        reply = await self._reply()
        assert reply.stale and not reply.token_ids, f"a stale run was answered: {reply}"
        assert await self._reply() is grpc.aio.EOF, "a stale run went on"
        return reply

    async def ended(self) -> None:
        """Reads to the end of a run to which something else happened."""
        while await self._reply() is not grpc.aio.EOF:
            pass

    async def refused(self) -> Refusal:
        try:
            await self.ended()
        except Refusal as refusal:
            return refusal
        raise AssertionError("the message was taken; it should have been refused")

    async def leave(self) -> None:
        self._stream.cancel()
        if self._reading:
            await asyncio.wait({self._reading})


@contextlib.asynccontextmanager
async def running(session: Open) -> AsyncIterator[Run]:
    run = Run(session)
    try:
        yield run
    finally:
        await run.leave()


def said(replies: Sequence[Any]) -> list[int]:
    return [token for reply in replies for token in reply.token_ids]


async def committed(session: Open) -> int:
    """Closes a session; how many tokens it had committed beyond its prompt."""
    closing = pb.CloseSessionRequest(session_id=session.session_id)
    return int((await session.bench.stub.CloseSession(closing, timeout=HANG)).committed_length) - len(session.prompt)


async def run_is_negotiated(bench: Bench) -> None:
    """Opening says how far a run may be ahead: 0 under rejection, where a run is refused by name."""
    async with opened(bench) as session, running(session) as run:
        reply = await bench.stub.OpenSession(session.opening())
        assert reply.max_unread_tokens > 0, "it does not run sessions"
        await committed(session)
        session.session_id = bench.session_id()
        reply = await bench.stub.OpenSession(session.opening(rule=REJECTION))
        assert reply.max_unread_tokens == 0
        await run.send(0, 5)
        refusal = await run.refused()
        assert (refusal.code, refusal.field) == ("INVALID_ARGUMENT", "run_until"), refusal


async def run_begins_before_its_opening(bench: Bench) -> None:
    """If the server grants it, a run waits for the OpenSession sent with it; a run of a closed session ends."""
    if not wire.info_from_wire((await bench.stub.GetModelInfo(_INFO)).model).max_unread_tokens:
        raise LeftOut("its runs begin after the opening")
    async with opened(bench) as session:
        for name in ("", session.session_id):
            await committed(session)
            session.session_id = name or bench.session_id()
            async with running(session) as run:
                await run.send(0, 8, session.truth[:3], opening_sent=True)
                if name:
                    assert (await run.refused()).code == "NOT_FOUND"
                    continue
                await run.pauses()
                await bench.stub.OpenSession(session.opening(), timeout=HANG)
                replies = await run.read(8)
                assert said(replies) == session.truth[:8] and replies[0].accepted == 3


async def run_begins_with_the_prompts_last_step(bench: Bench) -> None:
    """An opening with run_follows computes the run's first token; a paused run and a shorter prefix drop it."""
    async with opened(bench) as session:
        for known, until in ((0, 8), (0, 0), (2, 8)):
            await committed(session)
            session.session_id = bench.session_id()
            for prefix in ([*session.prompt, *session.truth[:known]], session.prompt):
                await bench.stub.OpenSession(session.opening(prefix, run_follows=True), timeout=HANG)
            async with running(session) as run:
                await run.send(0, until, session.truth[:3])
                if not until:
                    await run.pauses()
                    await run.send(0, 8)
                assert said(await run.read(8)) == session.truth[:8]


async def run_steps_on_alone(bench: Bench) -> None:
    """After one message every step is sent, the target's own tokens one by one; greedy and sampled."""
    for sampling in (GREEDY, SAMPLED):
        async with opened(bench, sampling) as session, running(session) as run:
            await run.send(0, 8)
            replies = await run.read(8)
            assert said(replies) == session.truth[:8], "not the target's own tokens"
            lengths = [reply.committed_length - len(session.prompt) for reply in replies]
            assert lengths == list(range(1, 9)), "a step is missing"
            assert not any(reply.drafted or reply.accepted for reply in replies)


async def run_pauses_at_its_limit(bench: Bench) -> None:
    """It goes to the newest run_until and no further, whatever was drafted; a later message moves it on."""
    async with opened(bench) as session, running(session) as run:
        await run.send(0, 3, session.truth[:6])
        assert said(await run.read(3)) == session.truth[:3]
        await run.pauses()
        await run.send(3, 9)
        assert said(await run.read(6)) == session.truth[3:9]
        assert await committed(session) == 9


async def run_obeys_its_window(bench: Bench) -> None:
    """A client that acknowledges nothing stops it; every acknowledgement lets it go on as far."""
    async with opened(bench) as session, running(session) as run:
        window = (await bench.stub.OpenSession(session.opening())).max_unread_tokens
        end, info = 2 * window, wire.info_from_wire((await bench.stub.GetModelInfo(_INFO)).model)
        if len(session.prompt) + end > info.max_sequence_length:
            raise LeftOut(f"it needs a sequence length of {len(session.prompt) + end}")
        session.truth = await bench.expected(session.prompt, GREEDY, end)
        await run.send(0, end)
        assert said(await run.read(window)) == session.truth[:window]
        await run.pauses()
        await run.send(10, end)
        assert said(await run.read(10)) == session.truth[window : window + 10]
        assert await committed(session) == window + 10


async def run_takes_late_drafts(bench: Bench) -> None:
    """A draft counts from its base_length: what was committed is skipped; an older one may fit where it fails."""
    async with opened(bench) as session, running(session) as run:
        truth = session.truth
        await run.send(0, 4)
        await run.read(4)
        await run.send(1, 8, truth[1:12])  # three of them are committed
        late = await run.read(4)
        assert (said(late), late[0].drafted, late[0].accepted) == (truth[4:8], 3, 3), "a late draft was not used"
        await run.send(8, 8, truth[8:11])  # the run pauses, and keeps it
        await run.send(8, 12, [truth[8], session.wrong(9)])
        replies = await run.read(4)
        assert said(replies) == truth[8:12]
        assert any(reply.accepted for reply in replies), "neither draft was used"


async def run_drops_drafts_on_other_tokens(bench: Bench) -> None:
    """Drafts after another last token, or beyond what is committed, are never verified and change nothing."""
    async with opened(bench) as session, running(session) as run:
        truth = session.truth
        await run.send(0, 3)
        await run.read(3)
        await run.send(3, 6, truth[3:6], last_token=session.wrong(2))
        replies = await run.read(3)
        await run.send(6, 6)
        await run.send(9, 9, truth[9:12])
        replies += await run.read(3)
        assert said(replies) == truth[3:9]
        assert not any(reply.drafted for reply in replies), "a draft on other tokens was verified"


async def run_ends_at_a_stop_token(bench: Bench) -> None:
    """A stop token of its first message ends it at once: nothing is committed after it."""
    async with opened(bench) as session, running(session) as run:
        stop = session.truth[5]
        end = session.truth.index(stop) + 1
        await run.send(0, 20, stop_token_ids=[stop])
        assert said(await run.read(end)) == session.truth[:end]
        await run.pauses()
        assert await committed(session) == end


async def run_first_message_is_fenced(bench: Bench) -> None:
    """At the committed length it runs; at the last base it gets the recorded reply first; otherwise it is stale."""
    async with opened(bench) as session:
        truth = session.truth
        await bench.stub.Verify(session.round(0, truth[:2]), timeout=HANG)
        for at, rest in ((5, {}), (3, {"last_token": session.wrong(2)})):
            async with running(session) as run:
                await run.send(at, 12, **rest)
                assert (await run.stale()).committed_length == len(session.prompt) + 3
        async with running(session) as run:
            await run.send(0, 8, [session.wrong(0)])
            replies = await run.read(8)
            assert said(replies) == truth[:8]
            assert [reply.replayed for reply in replies] == [True, *[False] * 5], "the lost round was not replayed"


async def run_resumes_after_a_lost_stream(bench: Bench) -> None:
    """A stream that breaks ends the run, not the session: opened with what was read, a new run says the same."""
    for sampling in (GREEDY, SAMPLED):
        async with opened(bench, sampling) as session:
            async with running(session) as run:
                await run.send(0, 19, session.truth[:4])
                known = len(said(await run.read(5)))
            prefix = [*session.prompt, *session.truth[:known]]
            reply = await bench.stub.OpenSession(session.opening(prefix, sampling=wire.sampling_to_wire(sampling)))
            assert reply.committed_length >= len(prefix)
            async with running(session) as run:
                await run.send(known, 19, session.truth[known : known + 3])
                assert said(await run.read(19 - known)) == session.truth[known:19]


async def run_ends_when_others_commit(bench: Bench) -> None:
    """A round of another call ends it, and so does another run; each token is committed once."""
    async with opened(bench) as session, running(session) as first, running(session) as second:
        await first.send(0, 3)
        await first.read(3)
        reply = await bench.stub.Verify(session.round(3, session.truth[3:5]), timeout=HANG)
        assert list(reply.token_ids) == session.truth[3:6]
        await first.ended()
        await second.send(6, 8)
        assert said(await second.read(2)) == session.truth[6:8]
        async with running(session) as third:
            await third.send(8, 10)
            assert said(await third.read(2)) == session.truth[8:10]
            await second.ended()


async def run_leaves_rounds_as_they_are(bench: Bench) -> None:
    """A client that knows no runs goes on in the session: its rounds are answered as ever, on a stream too."""
    async with opened(bench) as session:
        async with running(session) as run:
            await run.send(0, 4)
            await run.read(4)
        stream = bench.stub.VerifyStream(timeout=HANG)
        for done in (4, 6):
            await stream.write(session.round(done, session.truth[done : done + 1]))
            reply = await stream.read()
            assert list(reply.token_ids) == session.truth[done : done + 2] and reply.accepted == 1
            assert (reply.drafted, reply.messages_read) == (0, 0), "a round was answered like a step of a run"
        stream.cancel()


async def paused_run_loses_its_lease(bench: Bench) -> None:
    """A run whose client sends nothing more ends with its lease, and its slot is free; opened again it goes on."""
    assert bench.inside and bench.inside.target
    async with opened(bench) as session, running(session) as run:
        await run.send(0, 3)
        with contextlib.suppress(Refusal):  # a busy machine may need more than the lease to come here
            await run.read(3)
            refusal = await run.refused()
            assert refusal.code == "NOT_FOUND" and refusal.reason in ("SESSION_EXPIRED", "STREAM_IDLE"), refusal
        await bench.inside.lease_runs_out()
        await bench.inside.all_free()
        await bench.stub.OpenSession(session.opening([*session.prompt, *session.truth[:3]]))
        async with running(session) as again:
            await again.send(3, 6)
            assert said(await again.read(3)) == session.truth[3:6]


async def bad_run_fields(bench: Bench) -> None:
    """Each bad field of a message is named; it ends the run and harms no session."""
    vocabulary, most = bench.info.vocab_size, 257
    for field, rest in (
        ("draft_tokens", {"draft": [1] * most}),
        ("draft_tokens", {"draft": [1, vocabulary]}),
        ("last_token", {"last_token": vocabulary}),
        ("session_id", {"session_id": "another"}),
        ("run_until", {"run_until": None}),
        ("distributions", {"distributions": [{"token_ids": [1], "weights": [1.0]}]}),
        ("stop_token_ids", {"first": True, "stop_token_ids": [vocabulary]}),
        ("stop_token_ids", {"first": True, "stop_token_ids": [1] * 257}),
    ):
        async with opened(bench) as session:
            async with running(session) as run:
                if not rest.pop("first", False):
                    await run.send(0, 2)
                    await run.read(2)
                    await run.send(2, 5, **rest)
                else:
                    await run.send(0, 5, **rest)
                refusal = await run.refused()
            assert (refusal.code, refusal.field) == ("INVALID_ARGUMENT", field), f"{rest}: {refusal}"
            known = 0 if "stop_token_ids" in rest else 2
            async with running(session) as run:
                await run.send(known, known + 2)
                assert said(await run.read(2)) == session.truth[known : known + 2]
    async with opened(bench) as session, running(session) as run:
        await run.send(0, 5, run_until=2**31)
        refusal = await run.refused()
        assert (refusal.code, refusal.reason) == ("OUT_OF_RANGE", "SEQUENCE_TOO_LONG"), refusal


async def older_target_is_asked_in_rounds(bench: Bench) -> None:
    """A client that could drive a run asks a target that offers none in rounds, and gets the same tokens."""
    assert bench.inside and bench.inside.target and bench.inside.target.verifier
    service, prompt = bench.inside.target.verifier, bench.prompt(3)
    expected = await bench.expected(prompt, GREEDY, 16)
    filled = service._fill

    async def without_runs(*opened: Any) -> Any:
        reply = await filled(*opened)
        reply.max_unread_tokens = 0
        return reply

    for runs, fill in ((True, filled), (False, without_runs)):
        service._fill = fill  # type: ignore[method-assign]
        answer = await bench.ask(prompt, 16)
        assert list(answer.token_ids) == expected
        steps, rounds = answer.completion.stats.run_steps, answer.completion.stats.rounds
        assert steps == (rounds if runs else 0), f"{steps} steps of {rounds} were of a run"


_INFO = pb.TargetVerifierGetModelInfoRequest()
