"""A draft whose head knows frequent tokens only: the same choices as the whole head's among them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from tandem.checkpoints.locate import CheckpointError, find
from tandem.runners.load_runner import Execution, Shape, load_runner
from tandem.speculation.draws import draw
from tandem.speculation.types import SamplingParams
from tests.rows import fill, propose_row
from tests.runners.test_families import made
from tests.support import GREEDY, SAMPLED

VOCABULARY = 211
ONLY = [3, 4, 10, 50, 51, 52, 100, 150, 199]
PROMPT = [5, 9, 100, 7, 33, 9, 100]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made("llama", tmp_path, tie_word_embeddings=True, attention_bias=True)
    (tmp_path / "frequent_tokens.json").write_text(json.dumps(ONLY))
    return tmp_path


def load(folder: Path, verifies: bool = False):  # type: ignore[no-untyped-def]
    runner = load_runner(find(str(folder)), Execution("cpu", "float32"), Shape(2, 90, 4), verifies=verifies)
    runner.warm_up()
    return runner


def expected(folder: Path, sampling: SamplingParams, k: int) -> list[int]:
    """Draws from transformers' own logits, with all other tokens impossible."""
    module = LlamaForCausalLM.from_pretrained(folder).eval()
    tokens = list(PROMPT)
    for _ in range(k):
        with torch.inference_mode():
            logits = module(input_ids=torch.tensor([tokens])).logits[0, -1]
        full = torch.full_like(logits, -torch.inf)
        full[ONLY] = logits[ONLY]
        tokens.append(draw(full.numpy(), sampling, len(tokens)))
    return tokens[len(PROMPT) :]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, SamplingParams(temperature=1.5, seed=11)])
def test_a_draft_draws_among_its_frequent_tokens(folder: Path, sampling: SamplingParams) -> None:
    runner = load(folder)
    fill(runner, 1, PROMPT[:-2])
    (proposal,) = runner.propose([propose_row(1, len(PROMPT) - 1, tuple(PROMPT[-2:]), 4, sampling)])
    assert list(proposal.token_ids) == expected(folder, sampling, 4)
    assert set(proposal.token_ids) <= set(ONLY)
    assert runner.limits.vocab_size == VOCABULARY


def test_the_same_folder_as_a_target_keeps_its_whole_head(folder: Path) -> None:
    assert load(folder, verifies=True).model.draft_vocab is None


@pytest.mark.parametrize("content", ["{", "[]", '["a"]', "[-1]", "[211]", f"[{10**200}]", "{}"])
def test_a_bad_list_is_named(folder: Path, content: str) -> None:
    (folder / "frequent_tokens.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"frequent_tokens.json: not (valid JSON|a list of token ids below 211)"):
        load(folder)
