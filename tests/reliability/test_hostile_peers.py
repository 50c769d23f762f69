"""Servers that lie to us: each field of each reply, at and beyond its limits, in every way to generate.

No lie ends a process, leaks out as INTERNAL, or costs another request a token. The attacked request has the target's
tokens, or a declared error. A target that lies about its own next token, in bounds, is believed: only it knows.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from google.rpc import code_pb2

from tandem.engine.generator import Generator
from tandem.engine.model_config import ModelConfig
from tandem.rpc.channel import DRAFT, FUSED, TARGET
from tandem.rpc.generation_client import GenerationClient
from tandem.rpc.received_errors import TandemError
from tandem.rpc.verifier_client import VerifierClient
from tandem.services.statuses import to_status
from tandem.speculation.retry import Backoff
from tandem.speculation.types import GenerationRequest, Rule
from tandem.speculation.verification_mode import Pipeline
from tests.daily import daily
from tests.engine.test_prefix_cache import said, truth
from tests.reliability.hostile_peers import Change, Liar, changes, lying
from tests.services.prefill_sites import asking_engine, prefill_site, wake
from tests.services.test_prefill import PROMPT as LONG_PROMPT
from tests.support import (
    GREEDY,
    HANG,
    SAMPLED,
    ForgetfulRunner,
    answer,
    distributed,
    draft_config,
    fused_site,
    ids,
    let_all_expire,
    oracle,
    remote_draft,
    run,
    target_site,
    toy,
    until,
    worker_site,
)

PROMPT = b"abcabcabcabcab"
COUNT = 16
REFUSED = {"UNAVAILABLE", "ABORTED", "FAILED_PRECONDITION", "RESOURCE_EXHAUSTED"}
"""What a request may end with if a peer lies and there is no other."""


@dataclass(frozen=True, slots=True)
class Way:
    """How a request is generated at a target elsewhere."""

    pipeline: Pipeline
    draft: str
    rule: Rule = Rule.AGREEMENT

    @property
    def config(self) -> ModelConfig:
        if self.draft == "head":
            return draft_config(None, 4, 160, kind="eagle", model="head,miss=0.2")
        return draft_config("miss=0.2" if self.draft == "model" else None, 4, 160)

    @property
    def request(self) -> GenerationRequest:
        own = {"rule": self.rule, "sampling": replace(SAMPLED, temperature=0.0 if self.rule is Rule.REJECTION else 0.9)}
        return ids(PROMPT, COUNT, logprobs=2, margins=True, ignore_end_of_sequence=True, **own)

    @property
    def tokens(self) -> tuple[int, ...]:
        memory = 1 if self.draft == "lookup" else None
        return oracle(PROMPT, self.request.sampling, COUNT, past_the_end=True, memory=memory)


WAYS = {
    f"{pipeline.value}, {draft}": Way(pipeline, draft)
    for pipeline in (Pipeline.OFF, Pipeline.ON, Pipeline.NEVER_WAITING)
    for draft in ("model", "lookup", "head")
} | {"off, rejection": Way(Pipeline.OFF, "model", Rule.REJECTION)}


def believed(change: Change) -> bool:
    """Whether a target may say so: another token of its vocabulary in place of its own."""
    value = change.how.removeprefix("first ").removeprefix("last ")
    return change.path == ("token_ids",) and (value in ("+ 1", "- 1") or (value.isdecimal() and int(value) < 258))


@contextlib.contextmanager
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Nothing is logged inside that nobody expects: no task's exception that nobody looks at, no failed step."""
    with caplog.at_level(logging.WARNING):
        yield
    # grpc tells of callers who leave, and its poller meets late events of an earlier test's loop.
    ours = [(r, r.getMessage()) for r in caplog.records if not r.name.startswith("grpc")]
    wrong = [text for r, text in ours if r.name == "asyncio" or r.levelno >= logging.ERROR]
    wrong = [text for text in wrong if "PollerCompletionQueue" not in text]
    assert all(" is not used: " in line for line in wrong), wrong


@contextlib.asynccontextmanager
async def at_a_liar(way: Way, others: bool) -> AsyncIterator[tuple[Liar, Generator, VerifierClient]]:
    """A generator whose first target lies. `others`: there is an honest one too."""
    kind = {"kind": ForgetfulRunner} if way.draft == "lookup" else {}
    async with contextlib.AsyncExitStack() as stack:
        sites = [await stack.enter_async_context(target_site(toy(**kind), features=())) for _ in range(1 + others)]
        liar = await stack.enter_async_context(lying(sites[0].address))
        addresses = ",".join([liar.address, *(site.address for site in sites[1:])])
        loop = distributed(addresses, pipeline=way.pipeline, config=way.config, reconnect_seconds=HANG)
        generator, client = await stack.enter_async_context(loop)
        yield liar, generator, client
        for site in sites:
            assert site.engine and not site.engine.lost.is_set()
            await let_all_expire(site)
            await until(lambda slots=site.engine.slots: slots.free == slots.count)


async def outcome(generator: Any, request: GenerationRequest) -> tuple[int, ...] | str:
    """The tokens of a request, or the status that its caller gets."""
    task = asyncio.ensure_future(answer(generator.generate, request))
    await asyncio.wait({task}, timeout=HANG)
    assert task.done(), "a lie made a request hang"
    error = task.exception()
    return code_pb2.Code.Name(to_status(error).code) if isinstance(error, Exception) else task.result().token_ids


async def walk(way: Way, lies: Sequence[Change], others: bool, afters: Sequence[int] = (0, 2)) -> Counter[str]:
    """Tells each lie from the first reply on, and from a later one; then the truth is told again."""
    found: Counter[str] = Counter()
    async with at_a_liar(way, others) as (liar, generator, client):
        request, tokens = way.request, way.tokens
        for change in lies:
            for after in afters:
                client.pool.current = client.pool.addresses[0]
                liar.lie(change, after)
                got = await outcome(generator, request)
                told, name = liar.told, f"{change.name}, after {after}"
                liar.lie(None)
                if told and believed(change):
                    assert not isinstance(got, str) or got in {*REFUSED, "ALREADY_EXISTS"}, f"{name}: {got}"
                    found["believed"] += 1
                elif isinstance(got, str):
                    assert got in REFUSED, f"{name}: {got}"
                    assert not others, f"{name}: {got} although there is another target"
                    found[got] += 1
                else:
                    assert got == tokens, f"{name}: {got}"
                    found["tokens"] += 1
                found["told"] += told > 0
                client.pool.refused.clear()
        client.pool.current = client.pool.addresses[0]
        assert await outcome(generator, request) == tokens
    return found


def of_way(way: str, lies: Sequence[Change], share: int = 3) -> list[Change]:
    """A way's share of the lies. All ways together tell one of `share`; those marked thorough tell all."""
    return list(lies[list(WAYS).index(way) :: len(WAYS)])[::share]


@pytest.mark.parametrize("way", daily(WAYS, 4, 8))
def test_a_lie_in_a_verdict_ends_no_process_and_the_request_goes_on_at_another_target(
    way: str, caplog: pytest.LogCaptureFixture
) -> None:
    lies = of_way(way, changes(TARGET, "VerifyStream"))
    with quiet(caplog):
        found = run(walk(WAYS[way], lies, others=True))
    assert found["told"] > len(lies) < found["tokens"]


@pytest.mark.parametrize("way", daily(WAYS, 7, 9))
def test_a_lie_in_a_verdict_of_the_only_target_ends_its_request_alone(
    way: str, caplog: pytest.LogCaptureFixture
) -> None:
    lies = of_way(
        way, changes(TARGET, "VerifyStream")[::-1], share=1
    )  # few end a way that never waits: all, to meet some
    with quiet(caplog):
        found = run(walk(WAYS[way], lies, others=False))
    assert found["told"] > len(lies) and found["UNAVAILABLE"] > 1, found


@pytest.mark.parametrize("share", [pytest.param(1, marks=pytest.mark.thorough), 4], ids=["all", "a fourth"])
@pytest.mark.parametrize("others", [True, False], ids=["of two", "of one"])
def test_a_lie_about_an_opened_or_a_closed_session_ends_no_process(
    others: bool, share: int, caplog: pytest.LogCaptureFixture
) -> None:
    openings, closes = changes(TARGET, "OpenSession"), changes(TARGET, "CloseSession")
    with quiet(caplog):
        for number, way in [*enumerate((*WAYS.values(), WAYS["never-waiting, head"]))][others % share :: share]:
            lies = [*openings[number :: len(WAYS) + 1], *closes[number :: len(WAYS) + 1]][::3]
            assert run(walk(way, lies, others, afters=(0,)))["told"]


# --- descriptions ---


@pytest.mark.parametrize("share", [pytest.param(1, marks=pytest.mark.thorough), 8], ids=["all", "an eighth"])
async def test_a_target_that_lies_about_itself_is_refused_in_a_line_or_served_at_its_word(
    share: int, caplog: pytest.LogCaptureFixture
) -> None:
    with quiet(caplog):
        refused, lies = 0, changes(TARGET, "GetModelInfo")[::share]
        async with target_site(toy(), features=()) as site, lying(site.address) as liar:
            for number, change in enumerate(lies):
                way = [*WAYS.values()][number % len(WAYS)]
                if way.draft == "lookup":
                    continue
                liar.lie(change)
                try:
                    loop = distributed(liar.address, pipeline=way.pipeline, config=way.config)
                    async with loop as (generator, _):
                        got = await outcome(generator, way.request)
                        assert got in (way.tokens, "OUT_OF_RANGE", "INVALID_ARGUMENT", *REFUSED), change.name
                except ValueError as error:
                    assert len(str(error).splitlines()) == 1, change.name
                    refused += 1
                liar.lie(None)
        assert refused > 20 // share


# --- drafts ---


async def drafts_walk(pipeline: Pipeline, rule: Rule, lies: Sequence[Change], afters: Sequence[int]) -> Counter[str]:
    """The tokens are the target's own, whatever its DraftWorker says; what breaks the contract is its failure."""
    found: Counter[str] = Counter()
    sampling = GREEDY if rule is Rule.REJECTION else SAMPLED
    request = ids(PROMPT, COUNT, sampling=sampling, rule=rule, ignore_end_of_sequence=True)
    expected = oracle(PROMPT, sampling, COUNT, past_the_end=True)
    async with (
        worker_site(None, "miss=0.2") as site,
        lying(site.address) as liar,
        remote_draft(liar.address, pipeline=pipeline, seconds=HANG) as (generator, client),
    ):
        for change in lies:
            for after in afters:
                client.health.backoff, failures = Backoff(), client.health.failures
                client.forget()
                liar.lie(change, after)
                assert await outcome(generator, request) == expected, change.name
                found["told"] += liar.told > 0
                found["failures"] += client.health.failures > failures
                liar.lie(None)
        client.health.backoff = Backoff()
        client.forget()
        got = await answer(generator.generate, request)
        assert got.token_ids == expected and got.completion.stats.undrafted_rounds == 0
        assert got.completion.stats.drafted or pipeline is not Pipeline.OFF
    return found


DRAFTS = [
    (Pipeline.OFF, Rule.AGREEMENT, "Propose"),
    (Pipeline.OFF, Rule.REJECTION, "Propose"),
    (Pipeline.NEVER_WAITING, Rule.AGREEMENT, "Propose"),
]


@pytest.mark.parametrize("share", [pytest.param(1, marks=pytest.mark.thorough), 5], ids=["all", "a fifth"])
@pytest.mark.parametrize(
    ("pipeline", "rule", "method"), daily(DRAFTS, 0, 2), ids=["waits", "waits, rejection", "never waits"]
)
def test_a_draft_worker_that_lies_costs_drafts_and_no_token(
    pipeline: Pipeline, rule: Rule, method: str, share: int, caplog: pytest.LogCaptureFixture
) -> None:
    lies, found = [*changes(DRAFT, method), *changes(DRAFT, "GetModelInfo")][::share], Counter[str]()
    with quiet(caplog):
        while not (found["told"] and found["failures"]):  # a target that never waits may be done before any lie comes
            found += run(drafts_walk(pipeline, rule, lies, (0, 2) if share == 1 else (0,)))
    assert pipeline is not Pipeline.OFF or found["failures"] > len(lies) // 4


# --- pages ---


async def pages_walk(lies: Sequence[Change]) -> Counter[str]:
    """The tokens are the target's own, whatever its PrefillWorker says."""
    found: Counter[str] = Counter()
    async with prefill_site() as worker, lying(worker.address) as liar, asking_engine(liar.address) as engine:
        elsewhere = engine.remote_prefill
        assert elsewhere
        for number, change in enumerate(lies):
            for after in (0, 1, 3):
                prompt = [number % 256, number // 256, after, *LONG_PROMPT]
                liar.lie(change, after)
                before, asked = sum(elsewhere.fallbacks.values()), worker.faults.asked
                assert (await said(engine, prompt))[0] == truth(prompt), change.name
                assert worker.faults.asked > asked, "the worker rests"
                found["told"] += liar.told > 0
                found["fallbacks"] += sum(elsewhere.fallbacks.values()) > before
                liar.lie(None)
                wake(engine)
        assert not engine.lost.is_set() and engine.slots.free == engine.slots.count
    return found


@pytest.mark.parametrize("share", [pytest.param(1, marks=pytest.mark.thorough), 10], ids=["all", "a tenth"])
def test_a_prefill_worker_that_lies_costs_its_pages_and_no_token(share: int, caplog: pytest.LogCaptureFixture) -> None:
    lies = changes("PrefillWorker", "Prefill")[::share]
    with quiet(caplog):
        found = run(pages_walk(lies))
    assert found["told"] > len(lies) and found["fallbacks"] > len(lies) // 2


# --- clients ---


@pytest.mark.parametrize("share", [pytest.param(1, marks=pytest.mark.thorough), 18], ids=["all", "an eighteenth"])
async def test_a_server_that_lies_to_a_client_is_an_error_of_the_client_or_believed(
    share: int, caplog: pytest.LogCaptureFixture
) -> None:
    with quiet(caplog):
        lies, refused = [*changes(FUSED, "Generate"), *changes(FUSED, "GetModelInfo")][::share], 0
        request = ids(PROMPT, COUNT, logprobs=2, margins=True)
        async with (
            fused_site(toy(), toy()) as site,
            lying(site.address) as liar,
            GenerationClient.connect(liar.address, FUSED) as client,
        ):
            for change in lies:
                liar.lie(change)
                try:
                    await client.model_info()
                    async for _ in client.generate(request):
                        pass
                except TandemError as error:
                    assert error.code in REFUSED, f"{change.name}: {error}"
                    refused += 1
                liar.lie(None)
            assert (await answer(client.generate, request)).token_ids == oracle(PROMPT, GREEDY, COUNT)
            assert refused > len(lies) // 4
