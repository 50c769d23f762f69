"""DraftWorker's proposals: what a session gets, refusals, and the bytes that sessions without a slot may hold."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from tandem.rpc import wire
from tandem.rpc.channel import DRAFT
from tandem.rpc.received_errors import TandemError
from tandem.services.draft_worker import BYTES_PER_TOKEN, ProposalSessions
from tandem.services.security.access import Security
from tandem.services.security.limits import LimitReached, ServerLimits
from tandem.speculation.types import SamplingParams
from tandem.v1 import draft_worker_pb2 as pb
from tests.support import GREEDY, SAMPLED, Refusal, Site, answer, ids, oracle, raw_stub, refusal, until, worker_site
from tests.toy import ToyRunner

PROMPT = list(b"the prompt, long enough for three chunks of prefill")


def asking(tokens: Sequence[int], k: int = 4, sampling: SamplingParams = GREEDY, **rest: Any) -> pb.ProposeRequest:
    """The first message of a caller that waits for its drafts."""
    first = {"sampling": wire.sampling_to_wire(sampling), "tokenizer_sha256": "toy"} | rest
    return pb.ProposeRequest(tokens=tokens, speculation_length=k, **first)


def further(tokens: Sequence[int], k: int = 4) -> pb.ProposeRequest:
    return pb.ProposeRequest(tokens=tokens, speculation_length=k)


class Caller:
    """One stream of Propose. Sends a message and waits for its reply."""

    def __init__(self, worker: Any) -> None:
        self.call = worker.Propose()

    async def ask(self, message: pb.ProposeRequest) -> pb.ProposeResponse:
        await self.call.write(message)
        reply: pb.ProposeResponse = await self.call.read()
        return reply

    async def end(self) -> None:
        await self.call.done_writing()
        await self.call.read()


@contextlib.asynccontextmanager
async def calling(site: Site) -> AsyncIterator[Caller]:
    async with raw_stub(site.address, DRAFT) as worker:
        yield Caller(worker)


async def asked_once(worker: Any, message: pb.ProposeRequest) -> Refusal:
    """The refusal of a stream with one message."""
    return await refusal(worker.Propose(iter([message])).read())


def idle(site: Site, slots: int = 4) -> bool:
    return len(site.worker.sessions) == 0 and site.free == slots


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
async def test_a_session_gets_what_is_new_and_answers_with_the_models_draws(sampling: SamplingParams) -> None:
    truth = list(oracle(PROMPT, sampling, 12, past_the_end=True))
    async with worker_site(None) as site, calling(site) as caller:
        reply = await caller.ask(asking(PROMPT, sampling=sampling))
        assert list(reply.draft_tokens) == truth[:4]
        assert list(reply.proposed_by) == ["model"] * 4
        assert reply.server_seconds >= reply.compute_seconds > 0
        for held, now in ((0, 1), (1, 6), (6, 8), (8, 8)):
            reply = await caller.ask(further(truth[held:now], 2))
            assert list(reply.draft_tokens) == truth[now : now + 2]
            assert reply.base_length == len(PROMPT) + now
        assert site.free == 3
        await caller.end()
        assert idle(site)


# --- bad input ---


async def test_a_worker_without_a_free_slot_says_when_to_come_again() -> None:
    async with worker_site(None, slots=1) as site, calling(site) as caller, raw_stub(site.address, DRAFT) as worker:
        await caller.ask(asking(PROMPT))
        refused = await asked_once(worker, asking(PROMPT))
        assert (refused.code, refused.reason, refused.retry_seconds) == ("RESOURCE_EXHAUSTED", "NO_SLOT", 0.1)
        assert len(site.worker.sessions) == 1
        await caller.end()
        assert (await Caller(worker).ask(asking(PROMPT))).draft_tokens


# --- leases, cancellation ---


async def test_a_stream_that_is_cancelled_while_its_prompt_is_processed_leaves_no_slot_behind() -> None:
    async with worker_site(None, "step=0.05") as site, calling(site) as caller:
        await caller.call.write(asking([1] * 150))
        await until(lambda: site.free == 3)
        caller.call.cancel()
        await until(lambda: idle(site))


async def test_a_step_that_fails_is_an_error_of_that_stream_and_leaves_no_slot_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with worker_site(None) as site, raw_stub(site.address, DRAFT) as worker:
        with monkeypatch.context() as broken:
            broken.setattr(ToyRunner, "propose", lambda self, rows: 1 / 0)
            assert (await asked_once(worker, asking(PROMPT))).reason == "ENGINE_LOST"
            await until(lambda: idle(site))
        assert (await Caller(worker).ask(asking(PROMPT))).draft_tokens


# --- with and without a target ---


async def test_a_worker_that_only_proposes_says_what_drafts_and_generates_nothing() -> None:
    async with worker_site(None, "miss=0.1") as site, site.client() as client:
        info = await client.model_info()
        assert (info.model_name, info.draft_name, info.tokenizer_sha256) == ("", "toy", "toy")
        assert (info.vocab_size, info.max_sequence_length, info.max_speculation_length) == (258, 160, 5)
        with pytest.raises(TandemError, match="only proposes") as caught:
            await answer(client.generate, ids(b"x"))
        assert caught.value.code == "UNIMPLEMENTED"


def by_lookup(**limits: int) -> Any:
    return worker_site(None, None, security=Security(limits=ServerLimits(**limits)))


def held(site: Site) -> tuple[int, int]:
    """Sessions and bytes that the limits know of."""
    return len(site.worker.sessions), site.worker.sessions._bytes.total()


async def test_lookup_holds_so_many_bytes_and_a_stream_that_would_grow_beyond_them_is_refused() -> None:
    most = 20 * BYTES_PER_TOKEN
    async with by_lookup(max_proposal_bytes=most) as site, raw_stub(site.address, DRAFT) as worker:
        first, second = Caller(worker), Caller(worker)
        for caller in (first, second):
            await caller.ask(asking([1] * 8))
        refused = await asked_once(worker, asking([1] * 5))
        assert refused.code == "RESOURCE_EXHAUSTED" and "max_proposal_bytes" in refused.message
        assert held(site) == (2, 16 * BYTES_PER_TOKEN)
        await first.ask(further([1] * 4))
        await second.call.write(further([1]))
        assert "max_proposal_bytes" in (await refusal(second.call.read())).message
        assert held(site) == (1, 12 * BYTES_PER_TOKEN)
        await first.end()
        assert held(site) == (0, 0)
        assert (await asked_once(worker, asking([]))).code == "INVALID_ARGUMENT"
        assert held(site) == (0, 0)


def test_a_caller_with_a_name_has_half_and_leaves_the_rest_to_others() -> None:
    counts = ProposalSessions(8 * BYTES_PER_TOKEN)
    counts.grow("alice", 4)
    with pytest.raises(LimitReached, match=r"max_proposal_bytes: your .* 4096 of 4096"):
        counts.grow("alice", 1)
    counts.grow("bob", 4)
    with pytest.raises(LimitReached, match=r"max_proposal_bytes: all .* 8192 of 8192"):
        counts.grow("carol", 1)
    counts.grow("alice", -4)
    counts.grow("carol", 4)
