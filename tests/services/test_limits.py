"""Turns and limits (G6, G7): what a caller may have and send, bounded queues, openings, deadlines. Counted."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from tandem import AsyncClient
from tandem.engine.slots import limit_kv_memory
from tandem.rpc.received_errors import TandemError
from tandem.services.security.access import Security
from tandem.services.security.callers import AcceptedTokens
from tandem.services.security.limits import ServerLimits
from tandem.services.statuses import MAX_PARTIAL, Interrupted, QueueFull, to_status
from tandem.speculation.types import GenerationRequest
from tandem.v1 import generation_pb2
from tandem.v1 import target_verifier_pb2 as pb
from tests.gate import Gate
from tests.services.certificates import token_file
from tests.services.test_identity import TOKENS, ByToken
from tests.support import (
    GREEDY,
    HANG,
    TARGET,
    Site,
    answer,
    fused_site,
    ids,
    opening,
    oracle,
    raw_stub,
    refusal,
    target_site,
    toy,
    until,
    worker_site,
)
from tests.toy import ToyConfig, ToyRunner, ToyText, ToyTokenizer

PROMPT = b"many at once"


def limited(tmp_path, **limits: int) -> tuple[ByToken, Security]:
    callers = ByToken(tmp_path)
    return callers, Security(tokens=callers.security.tokens, limits=ServerLimits(**limits))


async def test_one_caller_has_so_many_sessions_and_another_its_own(tmp_path):
    callers, security = limited(tmp_path, max_sessions_per_identity=2)
    async with (
        target_site(security=security) as site,
        raw_stub(site.address, TARGET, callers.credentials("alice")) as alice,
        raw_stub(site.address, TARGET, callers.credentials("bob")) as bob,
    ):
        for name in ("a", "b"):
            await alice.OpenSession(opening(name))
        refused = await refusal(alice.OpenSession(opening("c")))
        await alice.OpenSession(opening("a"))  # one that is open is no other
        await bob.OpenSession(opening("a"))
        await alice.CloseSession(pb.CloseSessionRequest(session_id="b"))
        await alice.OpenSession(opening("c"))
    assert (refused.code, refused.retry_seconds) == ("RESOURCE_EXHAUSTED", 0.1)
    assert refused.message == "max_sessions_per_identity: 2 of your sessions are open, the limit is 2"


class Gated(ToyRunner):
    """Computes nothing before it is let."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.open = threading.Event()

    def logits(self, slot: int, position: int) -> Any:
        assert self.open.wait(HANG)
        return super().logits(slot, position)


async def test_one_caller_has_so_many_requests_under_way_and_another_its_own(tmp_path):
    callers, security = limited(tmp_path, max_requests_per_identity=1)
    runner = toy(kind=Gated)
    assert isinstance(runner, Gated)
    async with (
        target_site(runner, security=security) as site,
        site.client(callers.credentials("alice")) as alice,
        site.client(callers.credentials("bob")) as bob,
    ):
        assert site.method
        served = [asyncio.create_task(answer(each.generate, ids(PROMPT, 4))) for each in (alice, bob)]
        await until(lambda: site.method.under_way == 2)
        with pytest.raises(TandemError) as refused:
            await answer(alice.generate, ids(PROMPT, 4))
        runner.open.set()
        await asyncio.gather(*served)
        await until(lambda: not site.method.under_way)
        await answer(alice.generate, ids(PROMPT, 4))
    refused = refused.value
    assert (refused.code, refused.retry_seconds) == ("RESOURCE_EXHAUSTED", 0.1)
    assert refused.message == "max_requests_per_identity: 1 of your requests are running, the limit is 1"


async def test_a_text_above_the_operators_limit_is_refused_before_it_is_tokenized(monkeypatch):
    limits = ServerLimits(max_prompt_bytes=100)
    monkeypatch.setattr(ToyTokenizer, "encode", None)
    async with target_site(security=Security(limits=limits)) as site, site.client() as client:
        with pytest.raises(TandemError) as refused:
            await answer(client.generate, GenerationRequest(text="é" * 50 + "x"))
    code, message = refused.value.code, refused.value.message
    assert code == "OUT_OF_RANGE"
    assert message == "the prompt has 101 bytes and this server takes 100 (max_prompt_bytes)"


async def test_a_message_that_is_too_large_is_refused_and_the_server_goes_on():
    security = Security(max_message_bytes=2048)
    async with target_site(security=security) as site, site.client() as client:
        with pytest.raises(TandemError) as refused:
            await answer(client.generate, GenerationRequest(text="x" * 4096))
        after = await answer(client.generate, ids(PROMPT, 4))
    assert (refused.value.code, len(after.token_ids)) == ("RESOURCE_EXHAUSTED", 4)


async def test_a_draft_client_waits_for_its_turn_where_it_has_as_many_sessions_as_it_may(tmp_path):
    """The refusal says when to ask again, and our client does."""
    lines = f"alice {TOKENS['alice']}\n"
    tokens = AcceptedTokens(token_file(tmp_path / "one", lines))
    security = Security(tokens=tokens, limits=ServerLimits(max_sessions_per_identity=1))
    credentials = ByToken(tmp_path).credentials("alice")
    async with (
        target_site(security=security) as target,
        worker_site(target.address, credentials=credentials) as worker,
        worker.client() as client,
    ):
        said = await asyncio.gather(*(answer(client.generate, ids(PROMPT, 6)) for _ in range(3)))
    found = {one.token_ids for one in said}
    assert len(found) == 1


@pytest.mark.parametrize("wait", [30.0, 0.02], ids=["one long wait", "many short ones"])
async def test_openings_are_not_starved_by_callers_that_generate_without_a_pause(wait: float) -> None:
    """One slot, two that loop Generate, and one that loops OpenSession: each has its turn."""
    runner = toy(ToyConfig(step_seconds=0.002), slots=1)
    async with (
        target_site(runner, 1e6, opening_seconds=wait) as site,
        raw_stub(site.address) as target,
        site.client() as client,
    ):
        generated = 0

        async def generate() -> None:
            nonlocal generated
            while True:
                await answer(client.generate, ids(b"abc", 6, ignore_end_of_sequence=True))
                generated += 1

        loops = [asyncio.create_task(generate()) for _ in range(2)]
        await until(lambda: generated >= 2)
        before = generated
        for n in range(10):
            await opened(target, f"s{n}")
            await target.CloseSession(pb.CloseSessionRequest(session_id=f"s{n}"))
        assert generated - before <= 60, "an opening should wait for a few requests, not for dozens"
        for loop in loops:
            loop.cancel()
        await asyncio.gather(*loops, return_exceptions=True)
        await until(lambda: site.free == 1)


async def opened(target: Any, name: str) -> None:
    """Opens a session as our client does: where the server is full it comes back."""
    for _ in range(100):
        try:
            await target.OpenSession(opening(name))
            return
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    raise AssertionError("it was never opened")


async def test_openings_that_wait_count_as_their_callers_sessions() -> None:
    security = Security(limits=ServerLimits(max_sessions_per_identity=2))
    async with (
        target_site(toy(slots=1), security=security, opening_seconds=30) as site,
        raw_stub(site.address) as target,
    ):
        await target.OpenSession(opening("first"))
        waiting = asyncio.ensure_future(target.OpenSession(opening("second")))
        await until(lambda: site.engine.slots.waiting == 1)
        refused = await refusal(target.OpenSession(opening("third")))
        assert (refused.code, refused.reason) == ("RESOURCE_EXHAUSTED", "IDENTITY_LIMIT")
        await target.CloseSession(pb.CloseSessionRequest(session_id="first"))
        await waiting


async def test_the_same_opening_twice_while_it_waits_is_one_session() -> None:
    """G4."""
    async with target_site(toy(slots=2), opening_seconds=30) as site, raw_stub(site.address) as target:
        for name in ("a", "b"):
            await target.OpenSession(opening(name))
        twice = [asyncio.ensure_future(target.OpenSession(opening("c"))) for _ in range(2)]
        await until(lambda: site.engine.slots.waiting == 2)
        for name in ("a", "b"):
            await target.CloseSession(pb.CloseSessionRequest(session_id=name))
        await asyncio.gather(*twice)
        assert (len(site.verifier.sessions), site.free) == (1, 1)


async def test_a_server_that_began_to_drain_meanwhile_opens_nothing() -> None:
    async with target_site(toy(slots=1), opening_seconds=30) as site, raw_stub(site.address) as target:
        await target.OpenSession(opening("first"))
        waiting = asyncio.ensure_future(refusal(target.OpenSession(opening("second"))))
        await until(lambda: site.engine.slots.waiting == 1)
        site.lifecycle.accepting = False
        await target.CloseSession(pb.CloseSessionRequest(session_id="first"))
        assert (await waiting).code == "UNAVAILABLE"
        assert site.free == 1


async def test_sessions_that_share_memory_are_admitted_by_what_they_may_take() -> None:
    async with target_site(opening_seconds=0.01) as site, raw_stub(site.address) as target:
        limit_kv_memory(site.engine.slots, site.engine.batcher, [site.engine.runner], toy().kv_bytes(160))
        for name in ("a", "b"):
            await target.OpenSession(opening(name, max_total_tokens=60))
        assert (site.free, site.engine.slots.memory.reserved) == (2, 2 * toy().kv_bytes(60))
        refused = await refusal(target.OpenSession(opening("c", max_total_tokens=80)))
        assert (refused.code, refused.reason) == ("RESOURCE_EXHAUSTED", "NO_SLOT")
        assert refused.retry_seconds and "kv_cache_mb" in refused.message
        await target.CloseSession(pb.CloseSessionRequest(session_id="a"))
        await target.OpenSession(opening("c", max_total_tokens=80))
        for name in ("b", "c"):
            await target.CloseSession(pb.CloseSessionRequest(session_id=name))
        assert (site.free, site.engine.slots.memory.reserved) == (4, 0)


SERVICES = ("autoregressive", "fused", "draft_worker")
LONG = ids(b"a long one", 120, ignore_end_of_sequence=True)


@contextlib.asynccontextmanager
async def serving(architecture: str, gate: Gate) -> AsyncIterator[list[Site]]:
    """The site to ask, then the sites behind it, of one slot each; the target's steps pass the gate."""
    target = gate.guards(toy(ToyConfig(step_seconds=0.002), 1))
    async with contextlib.AsyncExitStack() as stack:
        if architecture == "fused":
            sites = [await stack.enter_async_context(fused_site(target, toy(slots=1)))]
        else:
            sites = [await stack.enter_async_context(target_site(target))]
        if architecture == "draft_worker":
            worker = worker_site(sites[0].address, "miss=0.5", 1)
            sites.insert(0, await stack.enter_async_context(worker))
        with gate:  # open at the end: a step that stands would hold up the close
            yield sites


def all_free(sites: list[Site]) -> bool:
    sessions = sum(len(site.verifier.sessions) for site in sites if site.verifier)
    return sessions == 0 and all(site.free == 1 for site in sites)


@pytest.mark.parametrize("architecture", SERVICES)
async def test_a_full_queue_refuses_with_a_delay_and_a_client_that_is_told_so_comes_back(architecture: str) -> None:
    """G6: RESOURCE_EXHAUSTED with RetryInfo; nobody who was let in is refused."""
    gate = Gate()
    async with serving(architecture, gate) as sites, sites[0].client() as client:
        assert sites[0].method
        sites[0].method.queue = 2
        gate.close()
        first = [asyncio.create_task(answer(client.generate, ids([65 + i], 12))) for i in range(3)]
        await until(lambda: sites[0].lifecycle.running == 3)
        with pytest.raises(TandemError, match="3 requests are under way: 1 slots and a queue of 2") as caught:
            await answer(client.generate, ids(b"x", 3))
        refused = caught.value
        assert (refused.code, refused.reason) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL")
        assert refused.retry_seconds == pytest.approx(0.1)
        gate.open()
        async with AsyncClient(sites[0].address, retry_seconds=HANG) as patient:
            late = await patient.generate(list(b"x"), max_new_tokens=3)
        assert late.token_ids == oracle(b"x", GREEDY, 3)
        assert [a.token_ids for a in await asyncio.gather(*first)] == [oracle([65 + i], GREEDY, 12) for i in range(3)]


@pytest.mark.parametrize("architecture", SERVICES)
async def test_a_request_whose_deadline_passes_frees_its_slot_within_one_step(architecture: str) -> None:
    """G7: while it runs, and while it waits for a slot; the client keeps what it was sent."""
    gate = Gate()
    async with serving(architecture, gate) as sites, sites[0].client() as client:
        await answer(client.generate, ids(b"x", 3))
        began = time.monotonic()
        await answer(client.generate, ids(b"x", 3))
        seconds = max(0.3, 20 * (time.monotonic() - began))  # so that some tokens come in time, on any machine
        seen: list[Any] = []

        async def read() -> None:
            async for event in client.generate(LONG, timeout=seconds):
                seen.append(event)

        running = asyncio.create_task(read())
        await until(lambda: bool(seen))
        await gate.stands()
        waiting = asyncio.create_task(answer(lambda r: client.generate(r, timeout=0.2), LONG))
        for task in (waiting, running):
            with pytest.raises(TandemError) as caught:
                await task
            assert caught.value.code == "DEADLINE_EXCEEDED"
        truth = oracle(b"a long one", GREEDY, 120, past_the_end=True)
        assert caught.value.produced == truth[: len(caught.value.produced)] and caught.value.produced
        await gate.comes_true_within(2, lambda: all_free(sites))
        gate.open()
        assert (await answer(client.generate, ids(b"x", 3))).token_ids == oracle(b"x", GREEDY, 3)


class Wordy(ToyTokenizer):
    """A hundred kilobytes of text a token: no transport's window holds a whole answer."""

    def stream(self) -> Any:
        class Words(ToyText):
            def push(self, token: int) -> str:
                return "w" * 100_000

        return Words()


def test_a_status_carries_the_tokens_so_far_and_stays_small() -> None:
    status = to_status(Interrupted(QueueFull("full"), tuple(range(100_000, 105_000))))
    partial = generation_pb2.PartialGeneration()
    (found,) = [detail for detail in status.details if detail.Unpack(partial)]
    assert partial.output_tokens == 5000
    assert list(partial.token_ids) == list(range(105_000 - MAX_PARTIAL, 105_000))
    assert status.ByteSize() * 4 / 3 < 8000 and found
    handed_on = to_status(TandemError("RESOURCE_EXHAUSTED", "full", 0.25, "NO_SLOT"))
    assert len(handed_on.details) == 2
