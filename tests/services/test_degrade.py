"""G10: what drafts may fail at any moment; the request goes on without a draft and says the same tokens."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.rpc.channel import DRAFT
from tandem.rpc.generation_client import GenerationClient
from tandem.runners.fused_step import fused_step
from tandem.runners.protocol import FusedResult, FusedRow, FusedStep, PrefillRow, ProposeRow, Runner
from tandem.speculation.types import Rule
from tandem.speculation.verification_mode import Pipeline
from tests.support import (
    GREEDY,
    HANG,
    SAMPLED,
    answer,
    distributed,
    fused_site,
    ids,
    oracle,
    run,
    server_process,
    target_site,
    toy,
    until,
)
from tests.toy import ToyConfig, ToyRunner

PROMPT = list(b"a prompt that is longer than one chunk of prefill")
BOTH = pytest.mark.parametrize(
    "pipeline", [Pipeline.OFF, Pipeline.ON, Pipeline.NEVER_WAITING], ids=["unary", "stream", "run"]
)


class Failing(ToyRunner):
    """Its steps raise, from the `at`-th proposal on; or every prefill does."""

    at, proposals, prefills_fail = 3, 0, False

    def propose(self, rows: Sequence[ProposeRow]) -> Any:
        self.proposals += 1
        if self.proposals >= self.at:
            raise RuntimeError("the draft's device is gone")
        return super().propose(rows)

    def prefill(self, rows: Sequence[PrefillRow]) -> Any:
        if self.prefills_fail:
            raise RuntimeError("the draft's device is gone")
        return super().prefill(rows)


class NeverPrefills(Failing):
    prefills_fail = True


class OneCall(ToyRunner):
    """A target that has the whole round as one call, as native pairs and graphs have."""

    calls = 0

    def fused_with(self, draft: Runner) -> FusedStep | None:
        def step(rows: Sequence[FusedRow]) -> Any:
            self.calls += 1
            found = fused_step(self, draft, rows)
            if any(isinstance(result, FusedResult) and result.draft_failed for result in found):
                raise RuntimeError("somewhere in the one call")
            return found

        return step


@pytest.mark.each_value
@pytest.mark.parametrize("draft", [Failing, NeverPrefills])
@pytest.mark.parametrize("target", [ToyRunner, OneCall], ids=["two steps", "one call"])
@pytest.mark.parametrize("kind", ["model", "hybrid"])
async def test_a_fused_server_whose_draft_fails_goes_on_without_and_says_so_once(
    draft: type[ToyRunner], target: type[ToyRunner], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "tandem.drafter"):
        async with fused_site(toy(kind=target), toy(kind=draft), kind=kind) as site, site.client() as client:
            for request in (
                ids(PROMPT, 40),
                ids(PROMPT, 40, sampling=SAMPLED),
                ids(PROMPT, 40, sampling=SAMPLED, rule=Rule.REJECTION, speculation_length=0),
            ):
                got = await answer(client.generate, request)
                assert got.token_ids == oracle(PROMPT, request.sampling, 40)
                if request.speculation_length != 0:
                    assert got.completion.stats.undrafted_rounds > 10
            assert site.free == 4 and not site.engine.lost.is_set()
    failed = [r.getMessage() for r in caplog.records if "failed" in r.getMessage()]
    assert failed == [
        "drafter model toy of this process failed (RuntimeError: the draft's device is gone): "
        "decoding without drafts, next trial in 1 s"
    ]


async def test_a_target_that_fails_in_the_one_call_is_lost_and_not_taken_for_the_draft() -> None:
    """G12."""

    class Broken(OneCall):
        def verify(self, rows: Any) -> Any:
            raise RuntimeError("the target's device is gone")

    async with fused_site(toy(kind=Broken), toy()) as site, site.client() as client:
        with pytest.raises(Exception, match="the target's device is gone"):
            await answer(client.generate, ids(PROMPT, 4))
        assert site.engine.lost.is_set()


@pytest.mark.each_value
@BOTH
@pytest.mark.parametrize("fails", [1, 4, 9])
async def test_a_draft_model_of_the_distributed_loop_that_fails_leaves_it_plain(
    pipeline: Pipeline, fails: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "tandem.drafter"):
        async with (
            target_site(toy(ToyConfig(step_seconds=0.002))) as site,  # else steps outrun the draft model
            distributed(site.address, f"salt=0,fails={fails}", pipeline=pipeline) as (generator, _),
        ):
            for sampling in (GREEDY, SAMPLED):
                got = await answer(generator.generate, ids(PROMPT, 40, sampling=sampling))
                assert got.token_ids == oracle(PROMPT, sampling, 40)
                assert got.completion.stats.undrafted_rounds >= 2
            await until(lambda: site.free == 4)
    assert len([r for r in caplog.records if "failed" in r.getMessage()]) == 1


def test_a_draft_worker_whose_device_fails_finishes_undrafted_and_ends_to_be_started_again(tmp_path: Path) -> None:
    """G10 for the request, G12 for the process."""
    long = ids(PROMPT, 60, sampling=SAMPLED, ignore_end_of_sequence=True)

    async def ask(address: str) -> None:
        async with GenerationClient.connect(address, DRAFT) as client:
            got = await answer(client.generate, replace(long, speculation_length=2))
            assert got.token_ids == oracle(PROMPT, SAMPLED, 60, past_the_end=True)
            assert got.completion.stats.drafted > 0 and got.completion.stats.undrafted_rounds > 10

    with server_process(tmp_path, "--role", "target", "--model", "step=0.005", ready_file="t.json") as target:
        worker = ("--role", "draft_worker", "--draft", "model", "--draft_model", "fails=9", "--pipeline", "off")
        with server_process(tmp_path, *worker, "--target_host", target.wait_ready(), ready_file="w.json") as server:
            run(ask(server.wait_ready()))
            assert server.process.wait(HANG) == 1
            assert "the model's device is lost" in server.log.read_text()


async def test_a_draft_that_comes_back_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.speculation.retry.FIRST_SECONDS", 0.0)

    class Once(ToyRunner):
        failed = False

        def propose(self, rows: Any) -> Any:
            if not self.failed:
                self.failed = True
                raise RuntimeError("once")
            return super().propose(rows)

    draft = toy(ToyConfig(miss=0.2), kind=Once)
    async with fused_site(toy(), draft) as site:
        assert site.generator is not None
        first = await answer(site.generator.generate, ids(PROMPT, 12, speculation_length=3))
        assert first.token_ids == oracle(PROMPT, GREEDY, 12)
        assert first.completion.stats.undrafted_rounds >= 1
