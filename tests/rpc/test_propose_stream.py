"""A target that never waits for its DraftWorker: same tokens whatever comes when, plain steps where nothing comes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import grpc
import pytest

from tandem.rpc import wire
from tandem.rpc.channel import DRAFT
from tandem.speculation.types import SamplingParams
from tandem.speculation.verification_mode import Pipeline
from tandem.v1 import draft_worker_pb2 as pb
from tests.rpc.test_remote_drafter import PROMPT, faulty, idle, long, truth
from tests.support import (
    GREEDY,
    HANG,
    SAMPLED,
    answer,
    raw_stub,
    remote_draft,
    run,
    toy,
    until,
    worker_site,
)
from tests.toy import ToyConfig

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


def test_what_is_drafted_is_verified_and_every_byte_second_and_proposer_is_counted() -> None:
    slower = toy(ToyConfig(step_seconds=0.02))  # on a busy machine too: a draft that is overtaken is made again

    async def test() -> None:
        async with worker_site(None) as site, running(site.address, slower) as (generator, _):
            got = await answer(generator.generate, long(140))
            assert got.token_ids == truth(140)
            stats = got.completion.stats
            assert stats.accepted == stats.drafted > 70  # the draft is the target itself
            assert stats.drafted_by == {"model": stats.drafted}
            assert stats.draft_seconds > 0 and stats.undrafted_rounds == 0
            assert 0 < stats.bytes_up < 40 * stats.rounds + 200 and stats.bytes_down > stats.drafted
            assert stats.drafted + stats.stale_drafts <= 140 + 5  # the last ones may lie behind the answer's end
            await until(lambda: idle(site))

    run(test())


def test_a_worker_that_never_answers_delays_no_token_and_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    async def silent(site: Any, requests: Any, context: Any) -> Any:
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
                assert got.token_ids == truth(120)
                assert got.completion.stats.drafted == 0
                assert not client.health.up and client.health.failures == 1
            assert got.completion.stats.undrafted_rounds >= 119

    with caplog.at_level(logging.INFO, "tandem.drafter"):
        run(test())
    (line,) = caplog.messages
    assert "DEADLINE_EXCEEDED" in line
