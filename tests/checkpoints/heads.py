"""EAGLE heads as they are published: folders of a few small random tensors."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

CONFIG = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "vocab_size": 10,
}


def eagle1_tensors(hidden: int = 8, vocabulary: int | None = None) -> dict[str, Tensor]:
    """A head's tensors, float16; with a `vocabulary`, its own embedding too."""
    torch.manual_seed(hidden)
    half = hidden // 2
    attention = {"q": (hidden, hidden), "k": (half, hidden), "v": (half, hidden), "o": (hidden, hidden)}
    made = {f"layers.0.self_attn.{name}_proj.weight": torch.randn(shape) for name, shape in attention.items()}
    made |= {f"layers.0.mlp.{name}_proj.weight": torch.randn(4, hidden) for name in ("gate", "up")}
    made |= {"layers.0.mlp.down_proj.weight": torch.randn(hidden, 4), "fc.weight": torch.randn(hidden, 2 * hidden)}
    made["layers.0.post_attention_layernorm.weight"] = torch.ones(hidden)
    if vocabulary is not None:
        made["embed_tokens.weight"] = torch.randn(vocabulary, hidden)
    return {name: tensor.to(torch.float16) for name, tensor in made.items()}


def eagle3_tensors(vocabulary: int = 10, drafted: int = 4, layer: str = "midlayer") -> dict[str, Tensor]:
    """An EAGLE-3 head's tensors, float16, in SpecForge's layout; `drafted`: every second token, or all."""
    torch.manual_seed(drafted)
    attention = {"q": (8, 16), "k": (4, 16), "v": (4, 16), "o": (8, 8)}
    made = {f"{layer}.self_attn.{name}_proj.weight": torch.randn(shape) for name, shape in attention.items()}
    made |= {f"{layer}.mlp.{name}_proj.weight": torch.randn(4, 8) for name in ("gate", "up")}
    made |= {f"{layer}.mlp.down_proj.weight": torch.randn(8, 4), "fc.weight": torch.randn(8, 24)}
    made |= {f"{layer}.{name}.weight": torch.ones(8) for name in ("hidden_norm", "input_layernorm")}
    made |= {f"{layer}.post_attention_layernorm.weight": torch.ones(8), "norm.weight": torch.ones(8)}
    made = {name: tensor.to(torch.float16) for name, tensor in made.items()}
    made["lm_head.weight"] = torch.randn(drafted, 8).to(torch.float16)
    return made if drafted == vocabulary else made | {"d2t": torch.arange(drafted)}


def eagle3_folder(folder: Path, tensors: dict[str, Tensor], **config: object) -> Path:
    """An EAGLE-3 head's folder; `config`: fields besides those of EAGLE-1 heads here."""
    own = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": len(tensors["lm_head.weight"])}
    return eagle1_folder(folder, tensors, **own | config)


def eagle1_folder(folder: Path, tensors: dict[str, Tensor], pickled: bool = False, **config: object) -> Path:
    """A published head's folder; `pickled`: its weights in PyTorch's file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
