"""The shipped draft: small, loadable anywhere, of the target's tokens, and worth having."""

from __future__ import annotations

import pytest
from transformers import AutoModelForCausalLM

from tandem.checkpoints.locate import EMBEDDED_DRAFT, embedded_draft, find, frequent_tokens
from tandem.checkpoints.tokenizers import HuggingFaceTokenizer
from tandem.comparison.measuring.workloads import built_in_prompts
from tandem.engine.batcher import Batcher
from tandem.engine.engine import Engine
from tandem.engine.generators import make_drafter
from tandem.engine.load_models import Loaded as LoadedModel
from tandem.engine.model_config import DraftChoice
from tandem.runners.load_runner import Execution, Shape, load_runner
from tandem.speculation.types import Request, SamplingParams
from tests.runners import real

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
            agreed += (await drafter.propose([*tokens, *answer[:at]], 1)).token_ids == (token,)
        await drafter.close()
        total += len(answer)
    await batcher.close()
    assert agreed >= 0.4 * total
