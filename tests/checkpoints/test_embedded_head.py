"""The shipped EAGLE-3 head: small, of the embedded target, and worth having."""

from __future__ import annotations

import json

import pytest

from tandem.checkpoints.head_config import is_head
from tandem.checkpoints.locate import (
    EMBEDDED_DRAFT,
    EMBEDDED_HEAD,
    CheckpointError,
    embedded_head,
    find,
    weights_revision,
)
from tandem.comparison.measuring.workloads import built_in_prompts
from tandem.engine.batcher import Batcher
from tandem.engine.generators import fused_generator
from tandem.engine.load_models import load_pair
from tandem.engine.model_config import DraftChoice, ModelConfig
from tandem.runners.load_runner import Execution, Shape
from tandem.speculation.types import GenerationRequest, SamplingParams
from tests.runners import real
from tests.runners.modules import read_head
from tests.runners.test_eagle import said


def test_all_shipped_weights_together_are_at_most_40_megabytes() -> None:
    files = [file for folder in (EMBEDDED_DRAFT, EMBEDDED_HEAD) for file in folder.iterdir()]
    assert sum(file.stat().st_size for file in files) <= 40_000_000


def test_it_is_the_default_head_of_the_embedded_target_alone() -> None:
    assert DraftChoice("eagle").resolve() == embedded_head() == str(EMBEDDED_HEAD) and is_head(EMBEDDED_HEAD)
    with pytest.raises(CheckpointError, match="the EAGLE head that is shipped is the embedded target's"):
        DraftChoice("eagle").resolve("another target")
    training = json.loads((EMBEDDED_HEAD / "training.json").read_text())
    assert training["target"] == weights_revision(find(None))
    head, own_embedding = read_head(EMBEDDED_HEAD)
    assert own_embedding is None and head.config.draft_vocab_size == training["columns"] == 6144


@pytest.mark.thorough
@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_a_fused_target_drafts_with_it_and_says_what_plain_decoding_says(temperature: str) -> None:
    """Acceptance far below what the card says, so that other machines' low bits don't matter; far above chance."""
    prompt = built_in_prompts(("counting_and_lists",), 1)[0]
    sampling = SamplingParams(temperature=float(temperature), seed=3 if temperature else 0)
    tokens = real.tokenizer().encode(prompt.text, prompt.chat)
    expected, _ = real.plain(real.target("float32"), tokens, 32, sampling)
    batcher, choice = Batcher("test"), DraftChoice("eagle")
    execution = Execution("cpu", "float32", 2, compile="native")
    target, head = await load_pair(ModelConfig(execution, Shape(1, 256, 4), draft=choice, default_k=4), batcher)
    request = GenerationRequest(text=prompt.text, chat=prompt.chat, sampling=sampling, max_new_tokens=32)
    found, stats = await said(fused_generator(target, head, 4, choice), request)
    await batcher.close()
    assert found == list(expected)
    assert stats.accepted > stats.drafted / 4
