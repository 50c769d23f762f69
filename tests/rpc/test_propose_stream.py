"""A target that never waits for its DraftWorker: same tokens whatever comes when, plain steps where nothing comes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from tandem.rpc import wire
from tandem.rpc.channel import DRAFT
from tandem.rpc.propose_stream import StreamedDrafts
from tandem.speculation.fallible import DrafterHealth
from tandem.speculation.retry import Backoff
from tandem.speculation.types import GenerationRequest, Request, SamplingParams, SpeculationStats
from tandem.speculation.verification_mode import Pipeline
from tandem.v1 import draft_worker_pb2 as pb
from tandem.v1.draft_worker_pb2_grpc import add_DraftWorkerServicer_to_server
from tests.support import (
    GREEDY,
    HANG,
    SAMPLED,
    Site,
    answer,
    ids,
    listening,
    oracle,
    raw_stub,
    remote_draft,
    run,
    toy,
    until,
    worker_site,
)
from tests.toy import ToyConfig

PROMPT = list(b"the prompt")
SLOW = ToyConfig(step_seconds=0.003)
Replies = AsyncIterator[pb.ProposeResponse]
Fault = Callable[[Replies], Replies]

running = partial(remote_draft, pipeline=Pipeline.NEVER_WAITING)


def long(count: int, sampling: SamplingParams = GREEDY) -> GenerationRequest:
    return ids(PROMPT, count, sampling=sampling, ignore_end_of_sequence=True)


def truth(count: int, sampling: SamplingParams = GREEDY, prompt: Sequence[int] = PROMPT) -> list[int]:
    return list(oracle(prompt, sampling, count, past_the_end=True))


def idle(site: Site, slots: int = 4) -> bool:
    return len(site.proposals.sessions) == 0 and site.free == slots


def telling(tokens: Sequence[int], ahead: int = 12, **first: Any) -> pb.ProposeRequest:
    return pb.ProposeRequest(tokens=tokens, draft_ahead=ahead, send_first=4, send_more=4, **first)


def beginning(tokens: Sequence[int] = PROMPT, sampling: SamplingParams = GREEDY, **rest: Any) -> Any:
    return telling(tokens, sampling=wire.sampling_to_wire(sampling), tokenizer_sha256="toy", **rest)


async def answered(call: Any, message: int, length: int) -> list[int]:
    """The draft of `length` tokens after the newest of the messages."""
    while (reply := await call.read()) is not grpc.aio.EOF:
        assert len(reply.proposed_by) == len(reply.draft_tokens)
        if reply.messages_read == message and len(reply.draft_tokens) == length:
            return list(reply.draft_tokens)
    raise AssertionError("the stream ended")


class Faulty:
    """A DraftWorker in front of the site's own; `fault` sees the replies of every stream."""

    def __init__(self, site: Site, fault: Fault) -> None:
        self._site, self._fault = site, fault

    def __getattr__(self, name: str) -> Any:
        return getattr(self._site.worker, name)

    async def Propose(self, requests: Any, context: Any) -> Any:
        async with contextlib.aclosing(self._site.proposals.stream(requests)) as replies:
            async for reply in self._fault(replies):
                yield reply


@contextlib.asynccontextmanager
async def faulty(site: Site, fault: Fault, kind: type = Faulty) -> AsyncIterator[str]:
    async with listening(partial(add_DraftWorkerServicer_to_server, kind(site, fault))) as address:
        yield address


# --- the worker ---


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_worker_follows_every_arrival_and_drafts_anew_where_it_was_wrong(sampling: SamplingParams) -> None:
    async def test() -> None:
        async with worker_site(None) as site, raw_stub(site.address, DRAFT) as worker:
            call = worker.Propose()
            await call.write(beginning(sampling=sampling))
            text = truth(20, sampling)
            assert await answered(call, 1, 12) == text[:12]
            await call.write(telling(text[:3]))
            assert await answered(call, 2, 12) == text[3:15]
            other = (text[3] + 1) % 256
            await call.write(telling([other], 3))
            assert await answered(call, 3, 3) == truth(3, sampling, [*PROMPT, *text[:3], other])
            assert len(site.proposals.sessions) == 1 and site.free == 3
            await call.done_writing()
            assert await call.read() is grpc.aio.EOF
            assert idle(site)

    run(test())


@pytest.mark.parametrize(
    ("messages", "code", "says"),
    [
        ([telling(PROMPT)], "INVALID_ARGUMENT", "sampling"),
        ([beginning([])], "INVALID_ARGUMENT", "tokens"),
        ([beginning([300])], "INVALID_ARGUMENT", "token id 300"),
        ([beginning([1] * 161)], "OUT_OF_RANGE", "above the sequence length"),
        ([beginning(), telling([1] * 151)], "OUT_OF_RANGE", "10 known tokens and 151 more"),
        ([beginning(), telling([1], 257)], "INVALID_ARGUMENT", "draft_ahead"),
        ([telling(PROMPT, sampling={}, tokenizer_sha256="other")], "FAILED_PRECONDITION", "vocabulary"),
    ],
)
def test_an_invalid_message_ends_the_stream_and_leaves_nothing(messages: Sequence[Any], code: str, says: str) -> None:
    async def test() -> None:
        async with worker_site(None) as site, raw_stub(site.address, DRAFT) as worker:
            with pytest.raises(grpc.RpcError) as caught:
                async for _ in worker.Propose(iter(messages)):
                    pass
            assert (caught.value.code().name, says in caught.value.details()) == (code, True), caught.value.details()
            await until(lambda: idle(site))

    run(test())


# --- the target ---


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_nonsense_and_delays_change_no_token(sampling: SamplingParams) -> None:
    chance = random.Random(3)

    async def disturbed(replies: Replies) -> Replies:
        async for reply in replies:
            await asyncio.sleep(chance.choice((0, 0, 0.002, 0.03)))
            if chance.random() < 0.3:
                yield pb.ProposeResponse(
                    base_length=chance.randrange(1, reply.base_length + 1),
                    draft_tokens=[chance.randrange(258) for _ in range(chance.randrange(40))],
                    drafted=chance.randrange(9),
                )
            yield reply

    async def test() -> None:
        slower, accepted = toy(ToyConfig(step_seconds=0.02)), 0  # on a busy machine too some drafts come in time
        async with worker_site(None, "miss=0.2") as site, faulty(site, disturbed) as address:
            async with running(address, slower) as (generator, client):
                for _ in range(3):
                    got = await answer(generator.generate, long(60, sampling))
                    assert list(got.token_ids) == truth(60, sampling)
                    stats = got.completion.stats
                    assert stats.run_steps == stats.rounds
                    accepted += stats.accepted
                    assert client.health.failures == 0
            assert accepted > 0
            await until(lambda: idle(site))

    run(test())


def test_what_is_drafted_is_verified_and_every_byte_second_and_proposer_is_counted() -> None:
    slower = toy(ToyConfig(step_seconds=0.02))  # on a busy machine too: a draft that is overtaken is made again

    async def test() -> None:
        async with worker_site(None) as site, running(site.address, slower) as (generator, _):
            got = await answer(generator.generate, long(140))
            assert list(got.token_ids) == truth(140)
            stats = got.completion.stats
            assert stats.accepted == stats.drafted > 70  # the draft is the target itself
            assert stats.drafted_by == {"model": stats.drafted}
            assert stats.draft_seconds > 0 and stats.undrafted_rounds == 0
            assert 0 < stats.bytes_up < 40 * stats.rounds + 200 and stats.bytes_down > stats.drafted
            assert stats.drafted + stats.stale_drafts <= 140 + 5  # the last ones may lie behind the answer's end
            await until(lambda: idle(site))

    run(test())


def test_a_worker_that_never_answers_delays_no_token_and_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    async def silent(replies: Replies) -> Replies:
        await asyncio.Event().wait()
        yield pb.ProposeResponse()

    async def test() -> None:
        async with (
            worker_site(None) as site,
            faulty(site, silent) as address,
            running(address, toy(SLOW), seconds=0.2) as (generator, client),
        ):
            client.health.backoff.first = HANG  # no trial meanwhile, however slow this machine is
            for _ in range(2):  # the second request is told, and does not wait for it again
                got = await answer(generator.generate, long(120))
                assert list(got.token_ids) == truth(120)
                assert got.completion.stats.drafted == 0
                assert not client.health.up and client.health.failures == 1
            assert got.completion.stats.undrafted_rounds >= 119

    with caplog.at_level(logging.INFO, "tandem.drafter"):
        run(test())
    (line,) = caplog.messages
    assert "DEADLINE_EXCEEDED" in line


@pytest.mark.parametrize("why", ["refused", "too long"])
def test_who_makes_no_trial_takes_none_from_others(why: str) -> None:
    """The worker is down and a trial is due; this request was refused before, or is too long for any worker."""

    async def limits(seconds: float) -> Any:
        return SimpleNamespace(max_sequence_length=len(PROMPT))

    async def test() -> None:
        now = [1000.0]
        health = DrafterHealth("x", Backoff(lambda: now[0]))
        for _ in range(6):
            health.failed(RuntimeError(), trial=True)
        now[0] += health.backoff.wait_seconds
        client: Any = SimpleNamespace(health=health, seconds=5.0, info=limits)
        drafts = StreamedDrafts(client, Request(GREEDY), 258, SpeculationStats())
        if why == "refused":
            drafts._backoff.failed()
        ahead: Any = SimpleNamespace(known=PROMPT)
        following = asyncio.create_task(drafts.run(ahead, len(PROMPT)))
        for _ in range(5):
            drafts.arrived()
            await asyncio.sleep(0)
        now[0] += 1.0
        trial = health.attempt()
        assert trial is not None and trial.trial
        following.cancel()

    run(test())


def test_a_text_too_long_for_the_worker_goes_on_without_it() -> None:
    async def test() -> None:
        async with worker_site(None, max_length=60) as site, running(site.address, toy(SLOW)) as (generator, client):
            got = await answer(generator.generate, long(120))
            assert list(got.token_ids) == truth(120)
            assert 10 < got.completion.stats.accepted < 50
            assert client.health.failures == 0 and client.health.up
            await until(lambda: idle(site))
            again = ids(got.token_ids[:80], 10, ignore_end_of_sequence=True)
            assert (await answer(generator.generate, again)).completion.stats.drafted == 0

    run(test())
