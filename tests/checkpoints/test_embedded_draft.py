"""The shipped draft and EAGLE-3 head: small, loadable anywhere, of the target's tokens, and worth having."""

from __future__ import annotations

import json

import pytest
from transformers import AutoModelForCausalLM

from tandem.checkpoints.head_config import is_head
from tandem.checkpoints.locate import (
    EMBEDDED_DRAFT,
    EMBEDDED_HEAD,
    CheckpointError,
    embedded_draft,
    embedded_head,
    find,
    frequent_tokens,
    weights_revision,
)
from tandem.checkpoints.tokenizers import HuggingFaceTokenizer
from tandem.comparison.measuring.workloads import built_in_prompts
from tandem.engine.batcher import Batcher
from tandem.engine.engine import Engine
from tandem.engine.generators import fused_generator, make_drafter
from tandem.engine.load_models import Loaded as LoadedModel
from tandem.engine.load_models import load_pair
from tandem.engine.model_config import DraftChoice, ModelConfig
from tandem.runners.load_runner import Execution, Shape, load_runner
from tandem.speculation.types import GenerationRequest, LengthPlan, Request, SamplingParams
from tests.runners import real
from tests.runners.modules import read_head
from tests.runners.test_eagle import said

GREEDY = SamplingParams()


def test_it_is_at_most_20_megabytes_and_transformers_loads_it() -> None:
    files = list(EMBEDDED_DRAFT.iterdir())
    assert sum(file.stat().st_size for file in files) <= 20_000_000
    assert {file.suffix for file in files} <= {".json", ".jinja", ".md", ".safetensors"}
    module, info = AutoModelForCausalLM.from_pretrained(EMBEDDED_DRAFT, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert module.config.vocab_size == 49152


def test_it_shares_the_targets_tokenizer_and_is_the_default() -> None:
    folder = embedded_draft()
    assert folder and DraftChoice().resolve() == DraftChoice("hybrid").resolve("another") == folder
    assert DraftChoice().resolve("another target") is DraftChoice("ngram").resolve() is None
    assert HuggingFaceTokenizer(find(folder)).sha256 == real.tokenizer().sha256
    only = frequent_tokens(find(folder), 49152)
    assert only and set(real.tokenizer().end_of_sequence_ids) <= set(only)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["counting_and_lists", "code"])
async def test_the_default_drafter_agrees_with_the_target_on_prompts_it_was_not_trained_on(kind: str) -> None:
    """Far below what the card says, so that other machines' low bits don't matter; far above chance."""
    batcher, agreed, total = Batcher("test"), 0, 0
    draft = load_runner(find(embedded_draft()), Execution("cpu", "float32", 2), Shape(1, 256, 5), verifies=False)
    draft.warm_up()
    loaded = LoadedModel(Engine(draft, batcher), real.tokenizer())
    for prompt in built_in_prompts((kind,), 2):
        tokens = real.tokenizer().encode(prompt.text, prompt.chat)
        answer, _ = real.plain(real.target("float32"), tokens, 32, GREEDY)
        drafter = make_drafter(loaded, Request(), 49152, DraftChoice())
        await drafter.open(tokens)
        for at, token in enumerate(answer):
            agreed += (await drafter.propose([*tokens, *answer[:at]], LengthPlan(1, 1))).token_ids == (token,)
        await drafter.close()
        total += len(answer)
    await batcher.close()
    assert agreed >= 0.4 * total


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
