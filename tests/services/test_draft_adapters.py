"""Adapters of the draft model: requests with the target's of the same name are drafted with them; tokens stay."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tandem.checkpoints.adapter_files import AdapterChoice
from tandem.cli.main import main
from tandem.speculation.types import GenerationEnd, SamplingParams
from tandem.speculation.verification_mode import Pipeline
from tests.engine.test_adapters import truth
from tests.services.test_adapters import COUNT, PROMPT, asking, both_samplings
from tests.support import Site, answer, draft_config, run, target_site, with_adapters, worker_site

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
