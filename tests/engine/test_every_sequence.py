"""What holds for one sequence holds for all: plain, verified, fused, drafting, and a session over gRPC."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from tandem.checkpoints.adapter_files import AdapterChoice
from tandem.engine.batcher import Batcher, DeviceLost, StepHung
from tandem.engine.engine import Engine
from tandem.engine.fused_rounds import FusedPair, FusedRounds
from tandem.engine.model_drafter import ModelDrafter
from tandem.engine.prefix_cache import PrefixSharing, share_prefixes
from tandem.engine.sequences import LocalVerifier
from tandem.engine.slots import limit_kv_memory
from tandem.engine.step_watch import StepBound, StepWatch
from tandem.rpc import wire
from tandem.runners.capabilities import PAGE
from tandem.speculation.types import LengthPlan, Request
from tandem.v1 import target_verifier_pb2 as pb
from tests.engine.test_step_watch import BOUND, Gated
from tests.support import GREEDY, SAMPLED, oracle, raw_stub, target_site, toy, until
from tests.toy import BACKEND, VOCAB_SIZE

PROMPT = list(b"a prompt that is longer than two pages of tokens, by some")
COUNT = 40
SLOT_BYTES = 1408  # of a toy, for its longest sequence


class Noting(Gated):
    """Counts the tokens that prefills process."""

    processed = 0

    def prefill(self, rows: Sequence[Any]) -> Any:
        self.processed += sum(len(row.tokens) for row in rows)
        return super().prefill(rows)


@dataclass
class Running:
    """One sequence: `more` returns what comes after some tokens, of which a round has a few."""

    open: Callable[[], Awaitable[object]]
    more: Callable[[Sequence[int]], Awaitable[Sequence[int]]]
    close: Callable[[], Awaitable[object]]


@dataclass
class Site:
    """A place where sequences run. `used`: the engines that each of them holds a slot of."""

    runner: Noting
    used: list[Engine]
    begin: Callable[[Request], Running]


def right_and_wrong(tokens: Sequence[int], request: Request) -> tuple[int, ...]:
    """Drafts of which the last is wrong."""
    truth = oracle(tokens, request.sampling, 3, past_the_end=True, adapter=request.adapter)
    return (*truth[:2], (truth[2] + 1) % 256)


@contextlib.asynccontextmanager
async def local(kind: str) -> AsyncIterator[Site]:
    batcher = Batcher("test")
    runners = [toy(kind=Noting), toy(kind=Noting)]
    target, draft = Engine(runners[0], batcher, vital=False), Engine(runners[1], batcher, vital=False)

    def verified(request: Request, drafts: bool) -> Running:
        verifier = LocalVerifier(target, request)

        async def more(tokens: Sequence[int]) -> Sequence[int]:
            return (await verifier.verify(tokens, right_and_wrong(tokens, request) if drafts else ())).token_ids

        return Running(lambda: verifier.open(PROMPT), more, verifier.close)

    def fused(request: Request) -> Running:
        rounds = FusedRounds(FusedPair(target, draft), request)

        async def more(tokens: Sequence[int]) -> Sequence[int]:
            return (await rounds.round(tokens, LengthPlan(3, 3)))[1].token_ids

        return Running(lambda: rounds.open(PROMPT), more, rounds.close)

    def drafting(request: Request) -> Running:
        drafter = ModelDrafter(target, request, VOCAB_SIZE)

        async def more(tokens: Sequence[int]) -> Sequence[int]:
            return (await drafter.propose(tokens, LengthPlan(3, 3))).token_ids

        return Running(lambda: drafter.open(PROMPT), more, drafter.close)

    begin = {
        "plain": lambda request: verified(request, drafts=False),
        "verified": lambda request: verified(request, drafts=True),
        "fused": fused,
        "drafting": drafting,
    }[kind]
    try:
        yield Site(runners[0], [target, draft] if kind == "fused" else [target], begin)
    finally:
        for runner in runners:
            runner.gate.set()
        await batcher.close()


@contextlib.asynccontextmanager
async def session() -> AsyncIterator[Site]:
    runner = toy(kind=Noting)
    async with target_site(runner) as site, raw_stub(site.address) as stub:
        names = iter(range(100))

        def begin(request: Request) -> Running:
            name = f"session {next(names)}"
            opening = pb.OpenSessionRequest(
                session_id=name,
                prefix=PROMPT,
                prompt_length=len(PROMPT),
                sampling=wire.sampling_to_wire(request.sampling),
                adapter=request.adapter,
                max_total_tokens=request.most_tokens(len(PROMPT)),
            )

            async def more(tokens: Sequence[int]) -> Sequence[int]:
                draft = right_and_wrong(tokens, request)
                asked = pb.VerifyRequest(
                    session_id=name, base_length=len(tokens), last_token=tokens[-1], draft_tokens=draft
                )
                return (await stub.Verify(asked)).token_ids

            async def close() -> None:
                with contextlib.suppress(grpc.aio.AioRpcError):  # it may be closed already
                    await stub.CloseSession(pb.CloseSessionRequest(session_id=name))

            return Running(lambda: stub.OpenSession(opening), more, close)

        assert site.engine
        yield Site(runner, [site.engine], begin)
        runner.gate.set()


KINDS: dict[str, Callable[[], AbstractAsyncContextManager[Site]]] = {
    **{kind: lambda kind=kind: local(kind) for kind in ("plain", "verified", "fused", "drafting")},
    "session": session,
}
every = pytest.mark.parametrize("kind", KINDS)


async def said(site: Site, request: Request, count: int = COUNT) -> tuple[int, ...]:
    """What a sequence says from its opening to its close."""
    sequence, tokens = site.begin(request), list(PROMPT)
    await sequence.open()
    while len(tokens) < len(PROMPT) + count:
        tokens += await sequence.more(tokens)
    await sequence.close()
    await sequence.close()
    return tuple(tokens[len(PROMPT) :][:count])


def truth(request: Request) -> tuple[int, ...]:
    return oracle(PROMPT, request.sampling, COUNT, past_the_end=True, adapter=request.adapter)


def asking(sampling: Any = GREEDY, adapter: str = "") -> Request:
    return Request(sampling, adapter=adapter, max_new_tokens=COUNT + 8)


@every
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
async def test_it_says_what_plain_decoding_says_and_frees_its_slots_once(kind: str, sampling: Any) -> None:
    async with KINDS[kind]() as site:
        assert await said(site, asking(sampling)) == truth(asking(sampling))
        assert [engine.slots.free for engine in site.used] == [4] * len(site.used)


@every
async def test_what_it_processed_and_said_is_what_the_next_one_begins_with(kind: str) -> None:
    async with KINDS[kind]() as site:
        await share_prefixes(site.used, PrefixSharing("all", 1), lambda: "")
        assert await said(site, asking()) == truth(asking())
        before = site.runner.processed
        assert await said(site, asking()) == truth(asking())
        assert site.runner.processed - before < PAGE


@every
async def test_it_has_the_memory_that_it_asked_for_until_it_is_closed(kind: str) -> None:
    async with KINDS[kind]() as site:
        engine = site.used[0]
        runners = [each.runner for each in site.used]
        limit_kv_memory(engine.slots, engine.batcher, runners, len(runners) * SLOT_BYTES * 3 // 2)
        sequence = site.begin(asking())
        await sequence.open()
        assert engine.slots.memory.reserved > 0
        waits = asyncio.ensure_future(said(site, asking()))
        tokens = list(PROMPT)
        while len(tokens) < len(PROMPT) + COUNT:
            tokens += await sequence.more(tokens)
        assert tuple(tokens[len(PROMPT) :][:COUNT]) == truth(asking())
        await sequence.close()
        assert await waits == truth(asking())
        assert engine.slots.memory.reserved == 0


@every
async def test_it_has_its_adapter_until_it_is_closed(kind: str) -> None:
    async with KINDS[kind]() as site:
        for engine in site.used:
            await engine.adapters.add(AdapterChoice("red", "red"), BACKEND.adapter)
        sequence = site.begin(asking(adapter="red"))
        await sequence.open()
        assert list(site.used[0].adapters.running) == ["red"]
        await sequence.close()
        assert not site.used[0].adapters.running
        assert await said(site, asking(adapter="red")) == truth(asking(adapter="red"))


@every
async def test_after_a_step_that_hung_it_processes_everything_again(kind: str) -> None:
    async with KINDS[kind]() as site:
        engine, now = site.used[0], [0.0]
        watch = StepWatch(engine.batcher, StepBound(BOUND), engine.lose, lambda: now[0])
        fine = list[bool]()
        watch.changed = fine.append
        sequence, tokens = site.begin(asking()), list(PROMPT)
        await sequence.open()
        tokens += await sequence.more(tokens)
        site.runner.gate.clear()
        hangs = asyncio.ensure_future(sequence.more(tokens))
        await until(site.runner.inside.is_set)
        while not hangs.done() and now[0] < 20 * BOUND:
            now[0] += 1.0
            watch.look()
            await asyncio.sleep(0.001)
        with pytest.raises((StepHung, grpc.aio.AioRpcError), match=r"(?i)hung|step"):
            await hangs
        site.runner.gate.set()
        await until(lambda: fine == [False, True])
        before = site.runner.processed
        while len(tokens) < len(PROMPT) + COUNT:
            tokens += await sequence.more(tokens)
        assert site.runner.processed - before >= len(PROMPT)
        assert tuple(tokens[len(PROMPT) :][:COUNT]) == truth(asking())
        await sequence.close()


@every
async def test_an_opening_that_is_left_frees_its_slots(kind: str) -> None:
    async with KINDS[kind]() as site:
        site.runner.gate.clear()
        sequence = site.begin(asking())
        opening = asyncio.ensure_future(sequence.open())
        await until(site.runner.inside.is_set)
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)
        site.runner.gate.set()
        await sequence.close()
        await until(lambda: [engine.slots.free for engine in site.used] == [4] * len(site.used))
        assert await said(site, asking()) == truth(asking())


@every
async def test_a_lost_device_ends_it_and_frees_its_slots(kind: str) -> None:
    async with KINDS[kind]() as site:
        sequence = site.begin(asking())
        await sequence.open()
        site.used[0].lose(DeviceLost("the device was reset"))
        with pytest.raises((DeviceLost, grpc.aio.AioRpcError), match="the device was reset"):
            await sequence.more(PROMPT)
        await sequence.close()
        assert [engine.slots.free for engine in site.used] == [4] * len(site.used)
