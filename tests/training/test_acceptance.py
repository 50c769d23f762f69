"""A pair measured: replayed rounds are a deployment's rounds, and the figures add up."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tandem.cli import main
from tandem.comparison.measuring.workloads import given_prompts
from tandem.engine.batcher import Batcher
from tandem.engine.engine import Engine
from tandem.engine.model_config import DraftChoice, ModelConfig
from tandem.engine.model_drafter import ModelDrafter
from tandem.engine.sequences import LocalVerifier
from tandem.host.device_times import times_named
from tandem.runners.load_runner import Shape
from tandem.speculation.length import FixedLength
from tandem.speculation.loop import speculate
from tandem.speculation.rounds import DraftedRounds
from tandem.speculation.stopping import Stopping, TextStream
from tandem.speculation.types import Request, SamplingParams, SpeculationStats
from tandem_train.accept import AcceptConfig, PairMeasurement, measure, print_measured
from tandem_train.replay import Agreement, Continuation, PairCosts, RoundFigures, drafts_of
from tests.support import GREEDY, SAMPLED, oracle, toy
from tests.toy import ToyConfig

PROMPT = tuple(b"a prompt, a prompt, a pro")
COUNT = 40
MISSES = ToyConfig(miss=0.3)


def said(sampling: SamplingParams) -> Continuation:
    return Continuation("toy", PROMPT, tuple(oracle(PROMPT, sampling, COUNT, past_the_end=True)))


async def deployed(drafter: ModelDrafter, engine: Engine, sampling: SamplingParams, k: int) -> SpeculationStats:
    stats = SpeculationStats()
    rounds = DraftedRounds(LocalVerifier(engine, Request(sampling)), drafter)
    async for _ in speculate(PROMPT, FixedLength(k), rounds, Stopping(TextStream(), COUNT), stats):
        pass
    return stats


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
async def test_a_replay_has_the_rounds_of_a_deployment(sampling: SamplingParams) -> None:
    batcher = Batcher("test")
    target, draft = Engine(toy(), batcher), Engine(toy(MISSES), batcher)
    one = said(sampling)
    drafts = await drafts_of(ModelDrafter(draft, Request(sampling), 258), one, 5)
    for k in (1, 3, 5):
        real = await deployed(ModelDrafter(draft, Request(sampling), 258), target, sampling, k)
        found = RoundFigures()
        found.add(one.answer, drafts, k)
        assert (found.rounds, found.drafted, found.accepted) == (real.rounds, real.drafted, real.accepted)
        assert found.by_position == real.accepted_per_position and found.tokens == COUNT
        assert found.model_rounds == real.drafted_per_position[0]
        assert 0 < real.accepted < real.drafted
    agreement, right = (
        Agreement(),
        [oracle(text, sampling, 1, MISSES, past_the_end=True)[0] for text in one.texts()],
    )
    agreement.add(one.answer, drafts)
    assert agreement == Agreement(sum(map(int.__eq__, right, one.answer)), COUNT) and agreement.agreed < COUNT
    await batcher.close()


def measured(draft: DraftChoice = DraftChoice("model", "miss=0.3,step=0.0002")) -> PairMeasurement:  # noqa: B008
    models = ModelConfig(shape=Shape(2, 160, 4), backend="toy", model="step=0.002", draft=draft)
    config = AcceptConfig(
        models, given_prompts(("one prompt", "another prompt")), max_new_tokens=30, longest=3, repeats=3
    )
    return asyncio.run(measure(config, lambda line: None))


def test_a_pair_is_measured_with_every_drafter() -> None:
    found = measured()
    drafters = {d.name: d for d in found.drafters}
    assert list(drafters) == ["ngram", "model", "hybrid"]
    model = drafters["model"]
    share = model.agreement["all"].agreed / model.agreement["all"].tokens
    assert 0.5 < share < 0.9
    assert model.agreement["all"].tokens == found.tokens
    assert model.rounds[3].tokens_per_round > model.rounds[1].tokens_per_round > 1.3
    assert sum(model.rounds[2].by_position) == model.rounds[2].accepted
    costs = PairCosts(dict.fromkeys(range(4), 0.02), {k: k * 0.002 for k in (1, 2, 3)})
    _, speedup = model.best(costs)
    assert costs.ratio == pytest.approx(0.1) and speedup == max(model.rounds[k].speedup(costs, k) for k in (1, 2, 3))
    rounds = RoundFigures(10, 25, 50, 15, [9], model_rounds=4)
    costs = PairCosts({0: 0.04, 5: 0.05}, {1: 0.003, 5: 0.011})
    assert rounds.speedup(costs, 5) == pytest.approx(2.5 * 0.04 / (0.05 + 0.4 * 0.011))
    assert set(found.costs.verify) == {0, 1, 2, 3} and set(found.costs.propose) == {1, 2, 3}


def test_a_head_is_judged_beside_its_target_and_one_that_gets_every_feature_is_always_right() -> None:
    drafters = {each.name: each for each in measured(draft=DraftChoice("hybrid", "head")).drafters}
    model = drafters["model"]
    assert model.agreement["all"].agreed == model.agreement["all"].tokens
    assert all(model.rounds[k].accepted == model.rounds[k].drafted > 0 for k in (1, 2, 3))
    assert drafters["hybrid"].rounds[3].tokens_per_round > 1


def test_the_role_prints_tables_and_writes_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("first prompt\nsecond prompt\n")
    output = tmp_path / "figures" / "accept.json"
    code = main.main(
        f"--role accept --backend toy --model step=0.002 --draft_model miss=0.2 --prompt_text {prompts} --gamma 2"
        f" --max_new_tokens 16 --output {output}".split()
    )
    text = capsys.readouterr().out
    assert code == 0
    for part in ("Agreement", "Rounds of 2", "speculation length", "cost ratio", "hybrid", "file"):
        assert part in text
    assert times_named(str(output.with_suffix(".step_times.json"))).draft
    figures = json.loads(output.read_text())
    assert figures["prompts"] == {"file": 2}
    assert {d["name"] for d in figures["drafters"]} == {"ngram", "model", "hybrid"}


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--max_new_tokens 1 --prompt x", "max_new_tokens: 1 is below 2"),
        ("--gamma 0 --prompt x", "speculation_length: 0 is below 1"),
    ],
)
def test_the_role_names_what_is_wrong(flags: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["--role", "accept", "--backend", "toy", *flags.split()]) == 2
    assert named in capsys.readouterr().err


def test_steps_that_took_no_time_and_drafters_without_a_round_are_written_and_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = measured()
    still = PairCosts(dict.fromkeys(found.costs.verify, 0.0), dict.fromkeys(found.costs.propose, 0.0))
    idle = replace(found.drafters[0], rounds={k: RoundFigures(by_position=[0] * 3) for k in found.drafters[0].rounds})
    for costs, drafters in ((still, found.drafters), (found.costs, (idle,)), (still, (idle,))):
        one = replace(found, costs=costs, drafters=drafters)
        assert json.loads(one.as_json())["tokens"] == found.tokens
        print_measured(one, Console(width=130))
    assert "plain decoding is as fast" in capsys.readouterr().out
