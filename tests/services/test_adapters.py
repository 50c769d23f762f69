"""Adapters over the wire: chosen by request and by session, alone and beside others, refused by name; a draft's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem import Client, DraftSession
from tandem.checkpoints.adapter_files import AdapterChoice
from tandem.cli.main import main
from tandem.rpc import wire
from tandem.rpc.received_errors import TandemError
from tandem.rpc.remote_session import RemoteSession
from tandem.rpc.verifier_client import VerifierClient
from tandem.services.target_verifier import TargetVerifierService
from tandem.speculation.types import GenerationEnd, GenerationRequest, Request, SamplingParams, SpeculationStats
from tandem.speculation.verification_mode import Pipeline
from tests.engine.test_adapters import truth
from tests.support import (
    GREEDY,
    SAMPLED,
    RemoteRounds,
    Site,
    answer,
    draft_config,
    ids,
    let_all_expire,
    opening,
    raw_stub,
    refusal,
    run,
    run_client,
    run_here,
    server_process,
    target_site,
    with_adapters,
    worker_site,
)
from tests.toy import BACKEND

PROMPT = tuple(b"what adapters say of this")
NAMES = ("", "red", "blue")
COUNT = 14
both_samplings = pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])


def asking(name: str, sampling: SamplingParams, **rest: Any) -> GenerationRequest:
    return ids(PROMPT, COUNT, sampling=sampling, ignore_end_of_sequence=True, adapter=name, **rest)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"adapter": "green"}, "adapter: 'green' is not one of: blue, red"),
        ({"adapter": "red", "adapter_revision": "toy:blue"}, "adapter_revision: this target's red is toy:red"),
        ({"adapter_revision": "toy:blue"}, "adapter_revision"),
    ],
)
async def test_a_session_that_cannot_have_its_adapter_is_refused_before_any_prefill(
    asked: dict[str, str], said: str
) -> None:
    async with target_site() as site, raw_stub(site.address) as target:
        await with_adapters(site.engine)
        found = await refusal(target.OpenSession(opening(prefix=PROMPT, **asked)))
        assert found.code == "INVALID_ARGUMENT" and said in found.message
        assert site.engine and site.engine.batcher.steps == 0 and site.free == site.engine.slots.count


async def test_a_server_that_does_not_know_adapters_is_not_taken_at_its_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """An older server ignores the field, so its output would silently be that of the target without an adapter."""
    from_wire, opens = wire.generation_from_wire, TargetVerifierService.OpenSession

    async def ignoring(self: Any, request: Any, context: Any) -> Any:
        request.ClearField("adapter")
        return await opens(self, request, context)

    monkeypatch.setattr(wire, "generation_from_wire", lambda message: replace(from_wire(message), adapter=""))
    monkeypatch.setattr(TargetVerifierService, "OpenSession", ignoring)
    async with (
        target_site() as site,
        worker_site(site.address) as worker,
        site.client() as client,
        worker.client() as client_of_worker,
    ):
        await with_adapters(site.engine)
        with pytest.raises(TandemError, match="adapter: this server does not apply it") as refused:
            await answer(client.generate, asking("red", GREEDY))
        assert refused.value.code == "FAILED_PRECONDITION"
        monkeypatch.setattr(wire, "generation_from_wire", from_wire)
        with pytest.raises(TandemError, match=r"adapter: the TargetVerifier at .* does not apply it"):
            await answer(client_of_worker.generate, asking("red", GREEDY))


@pytest.mark.parametrize("source", ["red", "blue"])
@both_samplings
async def test_a_session_that_is_lost_goes_on_elsewhere_with_the_same_adapter_alone(
    sampling: SamplingParams, source: str
) -> None:
    """At a target that has another adapter under its name, it does not go on."""
    async with target_site() as first, target_site() as second:
        await with_adapters(first.engine)
        assert second.engine
        await second.engine.adapters.add(AdapterChoice("red", source), BACKEND.adapter)
        client = VerifierClient(f"{first.address},{second.address}", "toy", retry_seconds=5.0)
        await client.model_info()
        client.pool.current = first.address
        session = RemoteSession(client, Request(sampling, adapter="red"), SpeculationStats())
        verifier, tokens = RemoteRounds(session, SpeculationStats()), list(PROMPT)
        try:
            await verifier.open(PROMPT)
            tokens += (await verifier.verify(tokens, ())).token_ids
            first.lifecycle.accepting = False
            await let_all_expire(first)
            if source == "red":
                for _ in range(4):
                    tokens += (await verifier.verify(tokens, ())).token_ids
                assert session.endpoint.address == second.address
            else:
                with pytest.raises(TandemError, match="adapter_revision: this target's red is toy:blue"):
                    await verifier.verify(tokens, ())
            assert tuple(tokens) == (*PROMPT, *truth("red", sampling, len(tokens) - len(PROMPT), PROMPT))
        finally:
            await verifier.close()
            await client.close()


class Wrong:
    """Drafts that are right for no adapter."""

    def propose(self, tokens: Sequence[int], k: int) -> Sequence[int]:
        return truth("", GREEDY, k, tokens)


def said_by_the_api(address: str, adapter: str) -> list[tuple[int, ...]]:
    """What a Client and a DraftSession get."""
    with Client(address) as client:
        wish = {"max_new_tokens": 14, "ignore_end_of_sequence": True}
        said = [client.generate(list(PROMPT), GREEDY, adapter=adapter, **wish).token_ids]
    with DraftSession(address, Wrong()) as session:
        said.append(session.generate(list(PROMPT), GREEDY, max_new_tokens=14, adapter=adapter).token_ids)
    return [tuple(each) for each in said]


def test_a_server_process_has_the_adapters_of_its_command_line(tmp_path: Path) -> None:
    flags = ("--role", "target", "--adapters", "red=of-red,blue=of-blue")
    with server_process(tmp_path, *flags) as server:
        assert said_by_the_api(server.wait_ready(), "blue") == [truth("of-blue", GREEDY, 14, PROMPT)] * 2
        printed = run_client(
            tmp_path,
            *("--target_host", server.wait_ready(), "--prompt", bytes(PROMPT).decode()),
            *("--adapter", "red", "--max_new_tokens", "14", "--ignore_eos"),
        )
        assert bytes(t for t in truth("of-red", GREEDY, 14, PROMPT) if t < 256).decode("latin-1") in printed.stdout


def test_a_server_that_cannot_have_an_adapter_says_so_in_one_line(tmp_path: Path) -> None:
    for flags, said in (
        (("--adapters", "toy=x"), "the model's own name"),
        (("--adapters", "red"), "red=DIR"),
        (
            (
                *("--role", "fused_target", "--draft_model", "head", "--draft", "eagle"),
                *("--adapters", "red=x", "--draft_adapters", "red=x"),
            ),
            "takes no LoRA adapters: lookup drafts for requests that have one",
        ),
    ):
        ran = run_here(tmp_path, "--role", "target", "--backend", "toy", "--port", "0", *flags)
        assert ran.returncode == 2 and said in ran.stderr and ran.stderr.count("\n") < 6, ran.stderr


OWN = (AdapterChoice("red", "red"),)
"""Of the draft, which is the target's equal: with it drafts are right, without it they are wrong."""


async def ended(site: Site, name: str, sampling: SamplingParams, k: int = 3) -> GenerationEnd:
    """The end of a request that said what the target with its adapter says."""
    async with site.client() as client:
        told = await answer(client.generate, asking(name, sampling, speculation_length=k))
    assert told.token_ids == truth(name, sampling, COUNT, PROMPT)
    return told.completion


@both_samplings
@pytest.mark.parametrize("pipeline", [Pipeline.OFF, Pipeline.ON, Pipeline.NEVER_WAITING], ids=lambda way: way.value)
def test_a_draft_worker_drafts_with_its_own_adapter_of_the_name_or_without(
    pipeline: Pipeline, sampling: SamplingParams
) -> None:
    async def test() -> None:
        config = replace(draft_config("", 4, 160), draft_adapters=OWN)
        async with target_site() as target:
            await with_adapters(target.engine)
            async with worker_site(target.address, config=config, pipeline=pipeline) as worker:
                ends = {name: await ended(worker, name, sampling) for name in ("", "red", "blue")}
                assert worker.engine and not worker.engine.adapters.running
        if pipeline is Pipeline.NEVER_WAITING:
            return  # a target that never waits may overtake any draft
        right, wrong = (ends[""], ends["red"]), ends["blue"]
        assert all(end.stats.accepted == end.stats.drafted > 0 for end in right)
        assert wrong.stats.accepted < wrong.stats.drafted / 2

    run(test())


@pytest.mark.parametrize(
    ("role", "flags", "said"),
    [
        ("fused_target", "--draft_adapters red=red", "the target has no adapter red"),
        ("fused_target", "--draft_adapters red=red,red=blue", "the name red is given twice"),
        ("fused_target", "--draft_adapters red=", "red: no folder is named; write red=DIR"),
        ("fused_target", "--adapters red=red --draft ngram --draft_adapters red=red", "prompt lookup drafts"),
        ("draft_worker", "--propose_only --draft_adapters red=red", "--propose_only has no target"),
        ("draft_worker", "--draft ngram --draft_adapters red=red", "prompt lookup drafts"),
    ],
)
def test_what_can_have_no_effect_is_refused_in_one_line(
    role: str, flags: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    drafts = ["--draft_model", "salt=0"] if "ngram" not in flags else []
    assert main(["--role", role, "--backend", "toy", *drafts, "--port", "0", *flags.split()]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "draft_adapters" in line]
    assert f"draft_adapters: {said}" in line
