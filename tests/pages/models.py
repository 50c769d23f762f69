"""Small models in place of a page's: real weights and a tokenizer over bytes, and what the stand-in for NxDI reads."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from tests.runners.tiny import byte_tokenizer

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 16,
}
LENGTH = 131072  # positions: as many as the page's longest sequence needs
SMALL = ("1B", "0.6B", "1.7B")
BASE = ("Llama-3.1-8B", "Llama-3.2-1B")
"""Models without a chat template."""


def write(folder: Path) -> Path:
    """Writes the model that `folder` is named after, unless it is there: a draft differs a little from its target."""
    if folder.exists():
        return folder
    disable_progress_bar()
    draft = any(size in folder.name for size in SMALL)
    tokenizer = byte_tokenizer()
    if folder.name not in BASE:
        tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    _module("Qwen3" in folder.name, draft).save_pretrained(folder)
    facts = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    facts["_toy"] = {"salt": 0, "miss": 0.3 if draft else 0.0}
    if folder.name.endswith("-Instruct-FP8"):
        facts["quantization_config"] = {"quant_method": "fbgemm_fp8"}
        _quantize(folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(facts), encoding="utf-8")
    return folder


def _module(qwen: bool, draft: bool) -> PreTrainedModel:
    torch.manual_seed(3)
    facts = {"vocab_size": 258, "num_hidden_layers": 2, "eos_token_id": 1, "max_position_embeddings": LENGTH, **SIZES}
    module = Qwen3ForCausalLM(Qwen3Config(**facts)) if qwen else LlamaForCausalLM(LlamaConfig(**facts))
    module.lm_head.weight.data *= 10
    torch.manual_seed(5 + draft)
    for parameter in module.parameters():
        parameter.data += 0.01 * torch.randn_like(parameter)
    return module.to(torch.bfloat16)


def _quantize(file: Path) -> None:
    """Puts the MLPs of the last layer into OCP's E4M3 with a scale for each output, as Llama-3.1-405B-Instruct-FP8."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(file).items():
        if "layers.1.mlp" in name:
            scale = tensor.float().abs().amax(1, keepdim=True) / 448
            tensors[name], tensors[f"{name}_scale"] = (tensor.float() / scale).to(torch.float8_e4m3fn), scale
        else:
            tensors[name] = tensor
    save_file(tensors, file, metadata={"format": "pt"})
