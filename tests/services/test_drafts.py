"""What drafts is a choice of each request: every architecture serves what it has, and refuses the rest by name."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import pytest

from tandem.clients.completion import request_of
from tandem.rpc.received_errors import TandemError
from tandem.speculation.request import Drafts, GenerationRequest
from tandem.speculation.types import InvalidField, Proposer, Request, Rule, SamplingParams
from tandem.speculation.verification_mode import Pipeline
from tandem.v1 import draft_worker_pb2 as worker_pb
from tandem.v1 import generation_pb2 as pb
from tests.architectures import Served, serving
from tests.daily import daily
from tests.support import (
    GREEDY,
    SAMPLED,
    Answer,
    Generate,
    answer,
    draft_config,
    ids,
    oracle,
    raw_stub,
    target_site,
    toy,
    worker_site,
)
from tests.support import refusal as refused
from tests.toy import ToyConfig

PROMPT = b"again and again and again and "
COUNT = 40
MODEL = "miss=0.3"


@dataclass(frozen=True)
class Place:
    """An architecture, what drafts there, and what a request may choose of it."""

    architecture: str
    draft: str | None
    kind: str
    has: tuple[Drafts, ...]
    features: bool = False

    def served(self) -> AbstractAsyncContextManager[Served]:
        target = toy(ToyConfig(step_seconds=0.002))  # a longer step takes no longer, so that copies are worth a trial
        return serving(self.architecture, self.draft, self.kind, 4, 5, features=self.features, target=target)


L, M, H = Drafts.LOOKUP, Drafts.MODEL, Drafts.HEAD
HEAD = f"head,{MODEL}"
PLAIN = Place("autoregressive", None, "ngram", ())
BOTH = (
    "draft_worker",
    "running_worker",
    "choosing_worker",
    "draft_role",
    "never_waiting",
    "remote_draft",
    "remote_chosen",
)
DRAFTING = [
    PLAIN,
    Place("fused", None, "ngram", (L,)),
    Place("fused", MODEL, "model", (M,)),
    Place("fused", MODEL, "hybrid", (L, M)),
    Place("fused", HEAD, "eagle", (H,)),
    Place("fused", HEAD, "hybrid", (L, H)),
    *(Place(architecture, MODEL, "hybrid", (L, M)) for architecture in BOTH),
    Place("draft_worker", None, "ngram", (L,)),
    Place("draft_worker", "head", "eagle", (H,), features=True),
    Place("pipelined_worker", "head", "hybrid", (L, H), features=True),
    Place("pipelined_worker", "head", "hybrid", (L,)),
    Place("remote_draft", MODEL, "model", (M,)),
    Place("remote_draft", None, "ngram", (L,)),
]
PROPOSERS = {L: {Proposer.NGRAM.value}, M: {Proposer.MODEL.value}, H: {Proposer.MODEL.value}, Drafts.NONE: set[str]()}


async def _said(generate: Generate, drafts: Drafts, sampling: SamplingParams, **rest: Any) -> Answer:
    return await answer(generate, ids(PROMPT, COUNT, sampling=sampling, drafts=drafts, **rest))


@pytest.mark.parametrize("place", daily(DRAFTING, 2, 4, 10, 13, 17), ids=str)
async def test_drafts_that_a_server_does_not_have_are_refused_by_name_with_those_that_it_has(place: Place) -> None:
    async with place.served() as served:
        for drafts in {*Drafts} - {Drafts.AUTO, Drafts.NONE, *place.has}:
            with pytest.raises((InvalidField, TandemError)) as caught:
                await _said(served.generate, drafts, GREEDY)
            if isinstance(caught.value, TandemError):
                assert caught.value.code == "INVALID_ARGUMENT"
            has = ", ".join(each.value for each in (Drafts.AUTO, Drafts.NONE, *place.has))
            text = f"drafts: {drafts.value} is not available: this server has {has}"
            assert str(caught.value).endswith(text), caught.value
        assert (await _said(served.generate, Drafts.AUTO, GREEDY)).token_ids == oracle(PROMPT, GREEDY, COUNT)


async def test_under_rejection_a_chosen_draft_is_drawn_from_too_and_none_is_plain() -> None:
    async with Place("draft_worker", MODEL, "hybrid", (L, M)).served() as served:
        for drafts in (L, M):
            got = await _said(served.generate, drafts, SAMPLED, rule=Rule.REJECTION)
            assert set(got.completion.stats.drafted_by) == PROPOSERS[drafts]
        plain = await _said(served.generate, Drafts.NONE, SAMPLED, rule=Rule.REJECTION)
        assert plain.token_ids == oracle(PROMPT, SAMPLED, COUNT)


async def test_without_drafts_or_with_lookup_neither_a_slot_of_the_draft_model_nor_features_are_taken() -> None:
    async with target_site(toy(), features=()) as target:
        for model in (MODEL, "head"):
            config = draft_config(None, 4, 160, kind="hybrid", model=model)
            async with worker_site(target.address, config=config, pipeline=Pipeline.OFF) as worker:
                assert worker.engine
                slots = [await worker.engine.slots.acquire(0.1) for _ in range(4)]
                async with worker.client() as client:
                    for drafts in (Drafts.NONE, L):
                        got = await _said(client.generate, drafts, GREEDY)
                        assert got.completion.stats.undrafted_rounds == got.completion.stats.feature_bytes == 0
                for slot in slots:
                    worker.engine.slots.release(slot)


def test_no_drafts_and_a_length_of_them_contradict_each_other() -> None:
    assert Request(drafts=Drafts.NONE).speculation_length == 0
    assert Request(drafts=Drafts.NONE, speculation_length=0) == Request(drafts=Drafts.NONE)
    with pytest.raises(InvalidField, match="drafts: none, but speculation_length is 3"):
        Request(drafts=Drafts.NONE, speculation_length=3)


async def test_what_contradicts_a_prediction_is_refused_by_its_name() -> None:
    for contradiction in ({"speculation_length": 0}, {"drafts": "none"}, {"drafts": "model"}):
        with pytest.raises(InvalidField, match="prediction: it drafts: drafts must be auto or lookup"):
            request_of("a", None, (), prediction="b", **contradiction)
    assert GenerationRequest(text="a", prediction="", speculation_length=0)
    async with PLAIN.served() as served:
        with pytest.raises(TandemError, match="the prediction has 100000 bytes and this server takes"):
            await _said(served.generate, Drafts.AUTO, GREEDY, prediction="a" * 100_000)


async def test_a_worker_refuses_proposals_of_what_it_does_not_have_and_keeps_no_session() -> None:
    async with (
        worker_site(None, config=draft_config(None, 4, 160, kind="ngram")) as site,
        raw_stub(site.address, site.service) as worker,
    ):
        asked = worker_pb.ProposeRequest(tokens=PROMPT, sampling=pb.Sampling(temperature=0.0))
        for value, named in ((pb.DRAFTS_MODEL, "auto, none, lookup"), (77, "77")):
            asked.drafts = value  # type: ignore[assignment]
            refusal = await refused(worker.Propose(iter([asked])))
            assert (refusal.code, refusal.field) == ("INVALID_ARGUMENT", "drafts") and named in refusal.message
        assert site.worker and not len(site.worker.sessions)
