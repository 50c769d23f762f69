"""A draft model with fewer positions than its target: the target goes on alone beyond them, with the same tokens."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tandem.engine.batcher import Batcher
from tandem.engine.generators import fused_generator, plain_generator
from tandem.engine.loading import load_pair
from tandem.engine.model_config import DraftChoice, ModelConfig
from tandem.runners.loading import Execution, Shape
from tandem.speculation.request import Drafts
from tandem.speculation.types import SamplingParams
from tandem.speculation.verification_mode import Pipeline
from tests.architectures import PLACES, serving
from tests.runners.tiny import model_folder
from tests.support import answer, ids, oracle, run

GREEDY = SamplingParams()
SHORT, LONG = 60, 160
DISTRIBUTED = ("draft_role", "pipelined", "never_waiting", "chosen", "remote_draft", "remote_run", "remote_chosen")
PLACED = [("fused", "model"), ("fused", "hybrid"), *((name, "model") for name in DISTRIBUTED)]


@pytest.mark.parametrize(("architecture", "kind"), PLACED)
def test_tokens_are_the_targets_across_the_last_position_of_the_draft(architecture: str, kind: str) -> None:
    async def test() -> None:
        async with serving(architecture, "salt=0", kind, k=5, draft_length=SHORT) as served:
            assert served.info.max_sequence_length == LONG
            prompts = [bytes(range(65, 65 + length)) for length in (9, 30, SHORT - 2, SHORT - 1, SHORT, SHORT + 1, 90)]
            asked = [ids(p, 65, sampling=GREEDY, ignore_end_of_sequence=True) for p in prompts]
            both = [*asked, *(ids(p, 65, ignore_end_of_sequence=True, drafts=Drafts.NONE) for p in prompts[:2])]
            answers = await asyncio.gather(*(answer(served.generate, each) for each in both[:4]))
            answers += [await answer(served.generate, each) for each in both[4:]]
            for request, got in zip(both, answers, strict=True):
                assert got.token_ids == oracle(request.token_ids, GREEDY, 65, past_the_end=True)
            drafted = [got.completion.stats.drafted for got in answers]
            drops = PLACES[architecture][1] not in (Pipeline.OFF, Pipeline.ON)  # drafts that are late
            assert drops or (drafted[0] > 20 and drafted[1] > 5)
            if kind != "hybrid":
                assert drafted[4:7] == [0, 0, 0]
            assert all(got.completion.stats.undrafted_rounds == 0 for got in answers)

    run(test())


@pytest.mark.parametrize("compile", ["native", "off"])
def test_a_short_draft_that_pads_otherwise_loads_beside_a_longer_target(tmp_path: Path, compile: str) -> None:
    for name in ("target", "draft"):
        model_folder(tmp_path / name, seed=5)
    for file, change in (
        ("config.json", {"max_position_embeddings": 64, "pad_token_id": 1}),
        ("tokenizer_config.json", {"pad_token": "<end>"}),
    ):
        path = tmp_path / "draft" / file
        path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    models = ModelConfig(
        Execution("cpu", "float32", compile=compile),
        Shape(slots=2, max_length=512),
        str(tmp_path / "target"),
        DraftChoice("model", str(tmp_path / "draft")),
    )

    async def test() -> None:
        batcher = Batcher("test")
        target, draft = await load_pair(models, batcher)
        assert draft and (target.runner.limits.max_length, draft.runner.limits.max_length) == (512, 64)
        pair, plain = fused_generator(target, draft, 4, models.draft), plain_generator(target)
        asked = [ids(bytes(range(65, 65 + length)), 80, ignore_end_of_sequence=True) for length in (20, 63, 64, 100)]
        expected = [(await answer(plain.generate, each)).token_ids for each in asked]
        together = await asyncio.gather(*(answer(pair.generate, each) for each in asked))
        assert [got.token_ids for got in together] == expected
        assert together[0].completion.stats.accepted > 10 and together[3].completion.stats.drafted == 0
        assert not target.engine.fused_fallbacks
        await batcher.close()

    run(test())
