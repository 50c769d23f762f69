"""What drafts is a choice of each request: every architecture serves what it has, and refuses the rest by name."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import pytest

from tandem.rpc.errors import TandemError
from tandem.runners.toy import ToyConfig
from tandem.runners.toy_head import ToyHead
from tandem.speculation.depth import Pipeline
from tandem.speculation.request import Drafts
from tandem.speculation.types import InvalidField, Proposer, Request, Rule, SamplingParams
from tandem.v1 import draft_worker_pb2 as worker_pb
from tandem.v1 import generation_pb2 as pb
from tandem.v1 import target_verifier_pb2
from tests.conformance.bench import refused
from tests.daily import daily
from tests.support import (
    GREEDY,
    HANG,
    SAMPLED,
    Answer,
    Generate,
    answer,
    distributed,
    draft_config,
    fused_site,
    ids,
    oracle,
    raw_stub,
    remote_draft,
    run,
    target_site,
    toy,
    worker_site,
)

PROMPT = b"again and again and again and "
COUNT = 40
MODEL = "miss=0.3"
LOOKUP_FIRST = {"kind": "hybrid", "model": MODEL}


def _config(**choice: Any) -> Any:
    return draft_config(None, 4, 160, **choice)


def _fused(kind: str, head: bool = False, draft: bool = True) -> AbstractAsyncContextManager[Generate]:
    target = toy(ToyConfig(step_seconds=0.002))  # a longer step takes no longer, so that copies are worth a trial
    drafts = (
        (ToyHead(target.limits, ToyConfig(miss=0.3), target) if head else toy(ToyConfig(miss=0.3))) if draft else None
    )
    return _asked(fused_site(target, drafts, kind=kind))


@contextlib.asynccontextmanager
async def _asked(site: AbstractAsyncContextManager[Any]) -> AsyncIterator[Generate]:
    """Generate of a server, over the wire."""
    async with site as found, found.client() as client:
        yield client.generate


@contextlib.asynccontextmanager
async def _worker(pipeline: Pipeline, features: bool = False, **choice: Any) -> AsyncIterator[Generate]:
    async with (
        target_site(toy(), features=() if features else None) as target,
        _asked(worker_site(target.address, config=_config(**choice), pipeline=pipeline)) as generate,
    ):
        yield generate


@contextlib.asynccontextmanager
async def _draft_role(pipeline: Pipeline) -> AsyncIterator[Generate]:
    async with (
        target_site(toy()) as target,
        distributed(target.address, config=_config(**LOOKUP_FIRST), pipeline=pipeline) as (generator, _),
    ):
        yield generator.generate


@contextlib.asynccontextmanager
async def _remote(pipeline: Pipeline, **choice: Any) -> AsyncIterator[Generate]:
    """A target that asks a worker which only proposes."""
    async with (
        worker_site(None, config=_config(**choice)) as worker,
        remote_draft(worker.address, toy(), HANG, pipeline=pipeline) as (generator, _),
    ):
        yield generator.generate


@dataclass(frozen=True)
class Place:
    """An architecture and what a request may choose there. `waits`: rounds wait for drafts, so that there are some."""

    deployed: Callable[[], AbstractAsyncContextManager[Generate]]
    has: tuple[Drafts, ...]
    waits: bool = True


NGRAM = {"kind": "ngram"}
L, M, H = Drafts.LOOKUP, Drafts.MODEL, Drafts.HEAD
PLACES = {
    "plain target": Place(lambda: _asked(target_site(toy())), ()),
    "fused, lookup": Place(lambda: _fused("ngram", draft=False), (L,)),
    "fused, model": Place(lambda: _fused("model"), (M,)),
    "fused, both": Place(lambda: _fused("hybrid"), (L, M)),
    "fused, head": Place(lambda: _fused("eagle", head=True), (H,)),
    "fused, head and lookup": Place(lambda: _fused("hybrid", head=True), (L, H)),
    "draft worker": Place(lambda: _worker(Pipeline.OFF, **LOOKUP_FIRST), (L, M)),
    "draft worker, pipelined": Place(lambda: _worker(Pipeline.ON, **LOOKUP_FIRST), (L, M)),
    "draft worker, never waiting": Place(lambda: _worker(Pipeline.NEVER_WAITING, **LOOKUP_FIRST), (L, M), False),
    "draft worker, choosing": Place(lambda: _worker(Pipeline.AUTO, **LOOKUP_FIRST), (L, M), False),
    "draft worker, lookup": Place(lambda: _worker(Pipeline.OFF, **NGRAM), (L,)),
    "draft worker, head": Place(lambda: _worker(Pipeline.OFF, True, kind="eagle", model="head"), (H,)),
    "draft worker, head and lookup": Place(lambda: _worker(Pipeline.ON, True, kind="hybrid", model="head"), (L, H)),
    "draft worker, head without features": Place(lambda: _worker(Pipeline.ON, kind="hybrid", model="head"), (L,)),
    "draft role": Place(lambda: _draft_role(Pipeline.OFF), (L, M)),
    "draft role, never waiting": Place(lambda: _draft_role(Pipeline.NEVER_WAITING), (L, M), False),
    "remote draft": Place(lambda: _remote(Pipeline.OFF, **LOOKUP_FIRST), (L, M)),
    "remote draft, model": Place(lambda: _remote(Pipeline.OFF, kind="model", model=MODEL), (M,)),
    "remote draft, lookup": Place(lambda: _remote(Pipeline.OFF, **NGRAM), (L,)),
    "remote draft, never waiting": Place(lambda: _remote(Pipeline.NEVER_WAITING, **LOOKUP_FIRST), (L, M), False),
    "remote draft, choosing": Place(lambda: _remote(Pipeline.AUTO, **LOOKUP_FIRST), (L, M), False),
}
PROPOSERS = {L: {Proposer.NGRAM.value}, M: {Proposer.MODEL.value}, H: {Proposer.MODEL.value}, Drafts.NONE: set[str]()}


async def _said(generate: Generate, drafts: Drafts, sampling: SamplingParams, **rest: Any) -> Answer:
    return await answer(generate, ids(PROMPT, COUNT, sampling=sampling, drafts=drafts, **rest))


@pytest.mark.parametrize("place", daily(PLACES.values(), 0, 5, 8, 11, 16, 19), ids=list(PLACES))
def test_every_choice_of_drafts_says_what_the_target_alone_says_and_drafts_with_nothing_else(place: Place) -> None:
    async def test() -> None:
        async with place.deployed() as generate:
            for drafts in (Drafts.AUTO, Drafts.NONE, *place.has):
                for sampling in (GREEDY, SAMPLED):
                    got = await _said(generate, drafts, sampling)
                    assert got.token_ids == oracle(PROMPT, sampling, COUNT), (drafts, sampling)
                    stats = got.completion.stats
                    assert stats.undrafted_rounds == 0, (drafts, stats)
                    if drafts is not Drafts.AUTO:
                        assert set(stats.drafted_by) <= PROPOSERS[drafts], (drafts, stats)
                    if drafts is Drafts.NONE:
                        assert (stats.drafted, stats.accepted, stats.rounds) == (0, 0, len(got.token_ids)), stats
                    if drafts in place.has and place.waits:
                        assert stats.drafted > 0, (drafts, stats)

    run(test())


@pytest.mark.parametrize("place", daily(PLACES.values(), 2, 4, 10, 13, 17), ids=list(PLACES))
def test_drafts_that_a_server_does_not_have_are_refused_by_name_with_those_that_it_has(place: Place) -> None:
    async def test() -> None:
        async with place.deployed() as generate:
            for drafts in {*Drafts} - {Drafts.AUTO, Drafts.NONE, *place.has}:
                with pytest.raises((InvalidField, TandemError)) as caught:
                    await _said(generate, drafts, GREEDY)
                if isinstance(caught.value, TandemError):
                    assert caught.value.code == "INVALID_ARGUMENT"
                has = ", ".join(each.value for each in (Drafts.AUTO, Drafts.NONE, *place.has))
                text = f"drafts: {drafts.value} is not available: this server has {has}"
                assert str(caught.value).endswith(text), caught.value
            assert (await _said(generate, Drafts.AUTO, GREEDY)).token_ids == oracle(PROMPT, GREEDY, COUNT)

    run(test())


def test_under_rejection_a_chosen_draft_is_drawn_from_too_and_none_is_plain() -> None:
    async def test() -> None:
        async with PLACES["draft worker"].deployed() as generate:
            for drafts in (L, M):
                got = await _said(generate, drafts, SAMPLED, rule=Rule.REJECTION)
                assert set(got.completion.stats.drafted_by) == PROPOSERS[drafts]
            plain = await _said(generate, Drafts.NONE, SAMPLED, rule=Rule.REJECTION)
            assert plain.token_ids == oracle(PROMPT, SAMPLED, COUNT)

    run(test())


def test_without_drafts_or_with_lookup_neither_a_slot_of_the_draft_model_nor_features_are_taken() -> None:
    async def test() -> None:
        async with target_site(toy(), features=()) as target:
            for choice in (LOOKUP_FIRST, {"kind": "hybrid", "model": "head"}):
                config = _config(**choice)
                async with worker_site(target.address, config=config, pipeline=Pipeline.OFF) as worker:
                    assert worker.engine
                    slots = [await worker.engine.slots.acquire(0.1) for _ in range(4)]
                    async with worker.client() as client:
                        for drafts in (Drafts.NONE, L):
                            got = await _said(client.generate, drafts, GREEDY)
                            assert got.completion.stats.undrafted_rounds == got.completion.stats.feature_bytes == 0
                    for slot in slots:
                        worker.engine.slots.release(slot)

    run(test())


def test_a_worker_that_has_not_answered_yet_is_asked_for_what_was_chosen_once_it_does() -> None:
    async def test() -> None:
        async with remote_draft("127.0.0.1:9", toy(), seconds=0.2) as (generator, _):
            for drafts in (Drafts.NONE, L, M):
                assert (await _said(generator.generate, drafts, GREEDY)).token_ids == oracle(PROMPT, GREEDY, COUNT)
            with pytest.raises(InvalidField, match="head is not available"):
                await _said(generator.generate, H, GREEDY)

    run(test())


def test_no_drafts_and_a_length_of_them_contradict_each_other() -> None:
    assert Request(drafts=Drafts.NONE).speculation_length == 0
    assert Request(drafts=Drafts.NONE, speculation_length=0) == Request(drafts=Drafts.NONE)
    with pytest.raises(InvalidField, match="drafts: none, but speculation_length is 3"):
        Request(drafts=Drafts.NONE, speculation_length=3)


def test_a_value_that_the_contract_does_not_know_is_refused_by_name() -> None:
    async def test() -> None:
        async with target_site(toy()) as target, raw_stub(target.address) as stub:
            asked = pb.Generation(token_ids=pb.TokenIds(ids=PROMPT))
            asked.drafts = 77  # type: ignore[assignment]
            refusal = await refused(stub.Generate(target_verifier_pb2.TargetVerifierGenerateRequest(generation=asked)))
            assert (refusal.code, refusal.field) == ("INVALID_ARGUMENT", "drafts") and "77" in refusal.message

    run(test())


def test_a_worker_refuses_proposals_of_what_it_does_not_have_and_keeps_no_session() -> None:
    async def test() -> None:
        async with worker_site(None, config=_config(**NGRAM)) as site, raw_stub(site.address, site.service) as worker:
            asked = worker_pb.ProposeRequest(tokens=PROMPT, sampling=pb.Sampling(temperature=0.0))
            for value, named in ((pb.DRAFTS_MODEL, "auto, none, lookup"), (77, "77")):
                asked.drafts = value  # type: ignore[assignment]
                refusal = await refused(worker.Propose(iter([asked])))
                assert (refusal.code, refusal.field) == ("INVALID_ARGUMENT", "drafts") and named in refusal.message
            assert site.proposals and not len(site.proposals.sessions)

    run(test())
