"""A target that drives a DraftWorker: same tokens whatever becomes of the worker, and no waiting for what is dead."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import grpc
import pytest

from tandem.rpc import wire
from tandem.rpc.channel import DRAFT
from tandem.rpc.propose_stream import DraftClient, WaitingDrafter
from tandem.rpc.received_errors import TandemError
from tandem.services.server_duplex import StreamIdle
from tandem.speculation.fallible import DrafterRefused
from tandem.speculation.types import GenerationRequest, LengthPlan, Request, SamplingParams, SpeculationStats
from tandem.speculation.verification_mode import Pipeline
from tandem.v1 import draft_worker_pb2 as pb
from tests.support import (
    GREEDY,
    HANG,
    SAMPLED,
    Site,
    answer,
    ids,
    in_front,
    oracle,
    raw_stub,
    refusal,
    remote_draft,
    toy,
    until,
    worker_site,
)
from tests.toy import ToyConfig

PROMPT = list(b"the prompt")


def long(count: int, sampling: SamplingParams = GREEDY) -> GenerationRequest:
    return ids(PROMPT, count, sampling=sampling, ignore_end_of_sequence=True)


def truth(count: int, sampling: SamplingParams = GREEDY, prompt: Sequence[int] = PROMPT) -> tuple[int, ...]:
    return oracle(prompt, sampling, count, past_the_end=True)


def idle(site: Site) -> bool:
    return len(site.worker.sessions) == 0 and site.free == 4


@contextlib.asynccontextmanager
async def drafter(
    address: str, seconds: float = HANG, vocab_size: int = 258, sampling: SamplingParams = GREEDY
) -> AsyncIterator[tuple[WaitingDrafter, SpeculationStats]]:
    client, stats = DraftClient(address, "toy", seconds), SpeculationStats()
    try:
        yield WaitingDrafter(client, Request(sampling), vocab_size, stats), stats
    finally:
        await client.close()


# --- a session ---


async def test_a_round_sends_only_what_is_new_and_every_byte_is_counted() -> None:
    said = list(truth(12, SAMPLED))
    async with worker_site(None) as site, drafter(site.address, sampling=SAMPLED) as (remote, stats):
        await remote.open(PROMPT * 10)
        opened = stats.bytes_up
        assert opened > 10 * len(PROMPT) and stats.network_seconds == 0
        await remote.propose(PROMPT * 10, LengthPlan(3, 3))
        assert 0 < stats.bytes_up - opened < 60
        assert stats.bytes_down > 0 and stats.network_seconds > 0
        assert len(site.worker.sessions) == 1
        await remote.close()
        await remote.close()
        await until(lambda: idle(site))
        await remote.open(PROMPT)
        draft = await remote.propose(PROMPT + said[:2], LengthPlan(3, 3))
        assert list(draft.token_ids) == said[2:5]
        assert [who.value for who in draft.proposed_by] == ["model"] * 3
        assert draft.compute_seconds > 0 and not draft.doubted
        doubted = await remote.propose(PROMPT + said[:2], LengthPlan(3, 3, least=1.0))
        assert list(doubted.token_ids) == said[2:3] and doubted.doubted
        await remote.close()


async def test_a_stream_that_ended_is_opened_again_with_all_tokens() -> None:
    streams: list[int] = []

    async def forgetful(inner: Any, requests: Any, context: Any) -> Any:
        streams.append(0)
        async with contextlib.aclosing(inner.Propose(requests, context)) as replies:
            async for reply in replies:
                yield reply
                streams[-1] += 1
                if streams[-1] == 5:
                    raise StreamIdle("as if its lease had run out")

    async with worker_site(None, "miss=0.3") as site, in_front(site, Propose=forgetful) as address:
        async with remote_draft(address) as (generator, client):
            got = await answer(generator.generate, long(60, SAMPLED))
        assert got.token_ids == truth(60, SAMPLED)
        assert len(streams) > 3
        assert client.health.undrafted == client.health.failures == 0
        await until(lambda: idle(site))


async def test_a_worker_of_smaller_limits_is_asked_within_them() -> None:
    async with (
        worker_site(None, max_length=40) as site,
        remote_draft(site.address, toy(max_draft=9)) as (generator, client),
    ):
        got = await answer(generator.generate, replace(long(100), speculation_length=9))
        assert got.token_ids == truth(100)
        stats = got.completion.stats
        assert len(stats.drafted_per_position) == 5  # the worker's maximum
        assert 20 < stats.drafted < 40  # then the text was too long for it
        assert client.health.up and client.health.undrafted == 0


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, DrafterRefused),
        (grpc.StatusCode.OUT_OF_RANGE, DrafterRefused),
        (grpc.StatusCode.INTERNAL, TandemError),
        (grpc.StatusCode.FAILED_PRECONDITION, TandemError),
    ],
)
async def test_a_refusal_of_one_request_is_told_from_a_worker_at_fault(
    status: grpc.StatusCode, kind: type[Exception]
) -> None:
    async def refuse(inner: Any, requests: Any, context: Any) -> Any:
        await context.abort(status, "no")
        yield

    async with worker_site(None) as site, in_front(site, Propose=refuse) as address, drafter(address) as (remote, _):
        with pytest.raises(kind, match="no"):
            await remote.open(PROMPT)


# --- what may happen to a worker ---


@pytest.mark.parametrize(("seconds", "blamed"), [(1.5, False), (4.0, True)])
async def test_a_worker_that_hangs_costs_a_share_of_a_requests_deadline(seconds: float, blamed: bool) -> None:
    async def hang(inner: Any, requests: Any, context: Any) -> Any:
        await asyncio.Event().wait()
        yield

    async with (
        worker_site(None) as site,
        in_front(site, Propose=hang) as address,
        remote_draft(address, seconds=3600.0) as (generator, client),
    ):
        got = await answer(generator.generate, replace(long(30), deadline=time.monotonic() + seconds))
        assert got.token_ids == truth(30)
        assert got.completion.stats.undrafted_rounds >= 29
        assert client.health.up is not blamed


async def test_a_target_starts_without_its_worker_and_finds_it_later(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "tandem.drafter"):
        async with worker_site(None) as gone:
            address = gone.address
        async with remote_draft(address, seconds=0.3) as (generator, client):
            assert generator.info.draft_name == f"remote:{address}"
            got = await answer(generator.generate, ids(PROMPT, 40))
            assert got.token_ids == oracle(PROMPT, GREEDY, 40) and got.completion.stats.drafted == 0
            async with worker_site(None, port=int(address.rpartition(":")[2])):
                give_up = time.monotonic() + HANG
                while not client.health.up and time.monotonic() < give_up:
                    assert (await answer(generator.generate, ids(PROMPT, 40))).token_ids == got.token_ids
                got = await answer(generator.generate, ids(PROMPT, 40))
                assert got.completion.stats.accepted == got.completion.stats.drafted > 0
    assert [r.levelname for r in caplog.records if r.name == "tandem.drafter"][:2] == ["WARNING", "INFO"]


async def test_a_worker_of_another_tokenizer_is_refused_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    async with worker_site(None) as site:
        monkeypatch.setattr("tests.toy.ToyTokenizer.sha256", "another")
        with pytest.raises(ValueError, match="must share a vocabulary"):
            async with remote_draft(site.address):
                pass


@pytest.mark.parametrize("pipeline", [Pipeline.OFF, Pipeline.NEVER_WAITING])
async def test_a_full_worker_refuses_and_its_callers_decode_plainly_until_it_has_a_slot(pipeline: Pipeline) -> None:
    runner = toy(ToyConfig(step_seconds=0.01))
    async with (
        worker_site(None, "miss=0.3", slots=1) as site,
        remote_draft(site.address, runner, pipeline=pipeline) as (generator, client),
    ):
        slot = site.engine.slots.take()
        requests = [ids([65 + i], 40, ignore_end_of_sequence=True) for i in range(4)]
        for taken in (True, False):
            answers = await asyncio.gather(*(answer(generator.generate, request) for request in requests))
            for i, got in enumerate(answers):
                assert got.token_ids == oracle([65 + i], GREEDY, 40, past_the_end=True)
            assert (max(got.completion.stats.drafted for got in answers) == 0) == taken
            assert client.health.up
            if taken:
                site.engine.slots.release(slot)


# --- processes ---


SLOW = ToyConfig(step_seconds=0.003)

running = partial(remote_draft, pipeline=Pipeline.NEVER_WAITING)


def telling(tokens: Sequence[int], ahead: int = 12, **first: Any) -> pb.ProposeRequest:
    return pb.ProposeRequest(tokens=tokens, draft_ahead=ahead, send_first=4, send_more=4, **first)


def beginning(tokens: Sequence[int] = PROMPT, sampling: SamplingParams = GREEDY, **rest: Any) -> Any:
    return telling(tokens, sampling=wire.sampling_to_wire(sampling), tokenizer_sha256="toy", **rest)


async def answered(call: Any, message: int, length: int) -> tuple[int, ...]:
    """The draft of `length` tokens after the newest of the messages."""
    while (reply := await call.read()) is not grpc.aio.EOF:
        assert len(reply.proposed_by) == len(reply.draft_tokens)
        if reply.messages_read == message and len(reply.draft_tokens) == length:
            return tuple(reply.draft_tokens)
    raise AssertionError("the stream ended")


# --- the worker ---


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
async def test_the_worker_follows_every_arrival_and_drafts_anew_where_it_was_wrong(sampling: SamplingParams) -> None:
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
        assert len(site.worker.sessions) == 1 and site.free == 3
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert idle(site)


@pytest.mark.parametrize(
    ("messages", "code", "says"),
    [
        ([beginning([1] * 161)], "OUT_OF_RANGE", "above the sequence length"),
        ([beginning(), telling([1] * 151)], "OUT_OF_RANGE", "10 known tokens and 151 more"),
        ([beginning(), telling([1], 257)], "INVALID_ARGUMENT", "draft_ahead"),
    ],
)
async def test_an_invalid_message_ends_the_stream_and_leaves_nothing(
    messages: Sequence[Any], code: str, says: str
) -> None:
    async with worker_site(None) as site, raw_stub(site.address, DRAFT) as worker:
        found = await refusal(worker.Propose(iter(messages)))
        assert found.code == code and says in found.message
        await until(lambda: idle(site))


# --- the target ---


async def test_what_is_drafted_is_verified_and_every_byte_second_and_proposer_is_counted() -> None:
    slower = toy(ToyConfig(step_seconds=0.02))  # on a busy machine too: a draft that is overtaken is made again
    async with worker_site(None) as site, running(site.address, slower) as (generator, _):
        got = await answer(generator.generate, long(140))
        assert got.token_ids == truth(140)
        stats = got.completion.stats
        assert stats.accepted == stats.drafted > 70  # the draft is the target itself
        assert stats.drafted_by == {"model": stats.drafted}
        assert stats.draft_seconds > 0 and stats.undrafted_rounds == 0
        assert 0 < stats.bytes_up < 40 * stats.rounds + 200 and stats.bytes_down > stats.drafted
        overtaken = stats.rounds - stats.drafted_per_position[0]  # on a busy machine: their drafts are made again
        assert stats.drafted + stats.stale_drafts <= 140 + 5 * (1 + overtaken)  # the last may lie behind the end
        await until(lambda: idle(site))


async def test_a_worker_that_never_answers_delays_no_token_and_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    async def silent(inner: Any, requests: Any, context: Any) -> Any:
        await asyncio.Event().wait()
        yield pb.ProposeResponse()

    with caplog.at_level(logging.INFO, "tandem.drafter"):
        async with (
            worker_site(None) as site,
            in_front(site, Propose=silent) as address,
            running(address, toy(SLOW), seconds=0.2) as (generator, client),
        ):
            client.health.backoff.first = HANG  # no trial meanwhile, however slow this machine is
            for _ in range(2):  # the second request is told, and does not wait for it again
                got = await answer(generator.generate, long(120))
                assert got.token_ids == truth(120)
                assert got.completion.stats.drafted == 0
                assert not client.health.up and client.health.failures == 1
            assert got.completion.stats.undrafted_rounds >= 119
    (line,) = caplog.messages
    assert "DEADLINE_EXCEEDED" in line
