"""Stock transformers modules of several families and checkpoint formats run in slots and decode as they do at home."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tandem.checkpoints.locate import CheckpointError, find
from tandem.runners.loading import Execution, Shape, load_runner
from tandem.runners.protocol import PrefillRow
from tandem.speculation.types import SamplingParams
from tests.rows import verify_row

SIZES: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
FAMILIES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "llama_tied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16)),
}
PROMPT = [5, 9, 100, 7, 33, 9, 100]


def made(family: str, folder: Path, **saving: Any) -> Any:
    torch.manual_seed(3)
    module = FAMILIES[family]().eval()
    module.save_pretrained(folder, **saving)
    return module


def load(folder: Path, dtype: str = "float32"):  # type: ignore[no-untyped-def]
    runner = load_runner(find(str(folder)), Execution("cpu", dtype), Shape(slots=3, max_length=100, max_draft=3))
    runner.warm_up()
    return runner


def decode(runner, slot: int, count: int) -> list[int]:  # type: ignore[no-untyped-def]
    """Greedy tokens, three at a time with whatever drafts."""
    runner.prefill([PrefillRow(slot, 0, tuple(PROMPT[:-1]))])
    tokens = list(PROMPT)
    while len(tokens) < len(PROMPT) + count:
        (verdict,) = runner.verify([verify_row(slot, len(tokens) - 1, tokens[-1], (8, 8), SamplingParams())])
        tokens += verdict.token_ids
    return tokens[len(PROMPT) :][:count]


def home(module: Any, count: int) -> list[int]:
    ids = torch.tensor([PROMPT])
    with torch.inference_mode():
        out = module.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, eos_token_id=None
        )
    return out[0, len(PROMPT) :].tolist()


def test_sharded_safetensors_load(tmp_path: Path) -> None:
    module = made("llama", tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert decode(load(tmp_path), 0, 8) == home(module, 8)


def test_pickled_weights_load(tmp_path: Path) -> None:
    module = made("llama", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(module.state_dict(), tmp_path / "pytorch_model.bin")
    assert decode(load(tmp_path), 0, 8) == home(module, 8)


def test_weights_that_lack_a_tensor_are_refused_by_name(tmp_path: Path) -> None:
    module = made("llama", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    state = module.state_dict()
    del state["model.layers.1.mlp.up_proj.weight"]
    torch.save(state, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj"):
        load(tmp_path)


def test_a_damaged_weight_file_is_refused_with_its_folder(tmp_path: Path) -> None:
    made("llama", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 64)
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        load(tmp_path)
