"""The backend against NxD Inference's own Python code, where it is at hand: see real_source.py."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tandem.checkpoints.convert import run_convert
from tandem.engine.batcher import Batcher
from tandem.engine.generators import fused_generator
from tandem.engine.load_models import load_pair
from tandem.engine.model_config import DraftChoice, ModelConfig
from tandem.runners.load_runner import Execution, Shape
from tandem.speculation.types import GenerationRequest
from tandem_train.heads.train_head import train
from tests.support import REPOSITORY, answer, run
from tests.training.test_heads import make_data, make_target, quiet, training

NAME = "TANDEM_NXDI_SOURCE"
SAME = (
    "plain, to the last position",
    "plain, sampled",
    "drafted, greedy",
    "drafted, sampled",
    "fused",
    "sampled, apart from the fused graph",
    "fused, its models loaded apart after it",
    "quantised",
    "fused, its target quantised",
    "fused, its target quantised with one QKV",
    "fused, quantised, its models apart",
    "fused, quantised, its draft told not to be",
    "the MLP kernel's FP8",
    "fused, the MLP kernel's FP8",
    "fused, FP8, its draft's own list",
    "plain after fused",
    "fused, families differ",
    "of transformers 5",
    "one line",
    "fused, one line",
    "with a mask of sequence ids",
    "eagle",
    "eagle-3 beside llama",
    "eagle-3 beside qwen3",
    "eagle-3, one line",
    "eagle-3, trained here",
    "adapters, plain, greedy",
    "adapters, plain, sampled",
    "adapters, drafted, greedy",
    "adapters, drafted, sampled",
    "buckets",
    "tokens only",
    "sampled on the host",
)


def make_pair(folder: Path) -> None:
    """Writes `target`, `head` as trained, and `draft`, which is the head completed for NxD Inference."""
    target = make_target(folder / "target", 8)
    train(training(target, make_data(folder / "data", target, 2), folder / "head", epochs=40), quiet)
    run_convert(folder / "head", folder / "draft", "eagle", target)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    source = os.environ.get(NAME)
    if not source:
        pytest.skip(f"{NAME} is not set: NxDI's and NxD's src folders and transformers 4.57, joined by {os.pathsep!r}")
    folder = tmp_path_factory.mktemp("nxdi")
    make_pair(folder / "trained")
    program = Path(__file__).with_name("real_source.py")
    command = [sys.executable, str(program), str(folder)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return {**json.loads(done.stdout.splitlines()[-1]), "ours": run(rounds_here(folder / "trained"))}


async def rounds_here(folder: Path) -> dict[str, int]:
    """What the head drafts for the prompts of real_source.py, and what its target accepts, without NxDI."""
    execution = Execution("cpu", "float32", compile="off")
    draft = DraftChoice("eagle", str(folder / "head"))
    config = ModelConfig(execution, Shape(3, 96, 4), str(folder / "target"), draft, default_k=4)
    batcher, counted = Batcher("test"), {"accepted": 0, "drafted": 0}
    try:
        target, head = await load_pair(config, batcher)
        assert head is not None
        generator = fused_generator(target, head, 4, draft)
        for prompt in ([7], [3, 9], list(range(5, 13)), list(range(1, 31))):
            wanted = GenerationRequest(
                token_ids=tuple(prompt),
                max_new_tokens=60 - len(prompt),
                ignore_end_of_sequence=True,
                speculation_length=4,
            )
            stats = (await answer(generator.generate, wanted)).completion.stats
            counted = {"accepted": counted["accepted"] + stats.accepted, "drafted": counted["drafted"] + stats.drafted}
        return counted
    finally:
        await batcher.close()


@pytest.mark.thorough
@pytest.mark.timeout(660)
@pytest.mark.parametrize("name", SAME)
def test_what_transformers_says_alone_comes_out_of_nxdi(report: dict[str, Any], name: str) -> None:
    assert report[name].get("same") == [True] * 4, report[name]
    if name.startswith("adapters"):
        assert report[name]["unlike"] == [True, False, True, True]
    if name in ("drafted, greedy", "fused"):
        assert 0 < report[name]["accepted"] < report[name]["drafted"]


@pytest.mark.thorough
@pytest.mark.timeout(660)
def test_a_draft_whose_modules_nobody_lists_could_not_be_loaded(report: dict[str, Any]) -> None:
    """What Tandem lists for a draft is needed: without it NxDI looks for scales, after it has compiled."""
    failed = report["fused, FP8, its draft not listed"]["failed"]
    assert re.search(r"draft_model\.layers\.\S+\.scale", failed), failed


@pytest.mark.thorough
@pytest.mark.timeout(660)
def test_nxdi_accepts_of_a_head_what_our_own_steps_accept(report: dict[str, Any]) -> None:
    """The head as trained, beside the same target by module code; its last rounds may be drafted shorter here."""
    found, own = report["eagle-3, trained here"], report["ours"]
    assert found["accepted"] == own["accepted"] > found["drafted"] // 2, (found, own)


@pytest.mark.thorough
@pytest.mark.timeout(660)
def test_our_lists_of_fields_are_nxdis(report: dict[str, Any]) -> None:
    assert report["fields"] == {name: [] for name in report["fields"]}
