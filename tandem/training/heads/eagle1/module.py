"""The EAGLE-1 head (Li et al. 2024) as a torch module, whose parameters are named as in published files.

Row r reads the target's hidden state of token r, after its last norm, and the embedding of token r + 1. It predicts the
hidden state of token r + 1, of which the target's own output matrix makes a guess of token r + 2.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from tandem.checkpoints.eagle1 import check_eagle1
from tandem.checkpoints.tensors import SAFETENSORS, Tensors


class Eagle1Head(nn.Module):
    """One decoder layer, without a norm of its inputs, on `fc` of an embedding and a hidden state."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        layer = LlamaDecoderLayer(config, 0)
        layer.input_layernorm = nn.Identity()
        self.layers = nn.ModuleList([layer])
        self._rotary: Any = [LlamaRotaryEmbedding(config)]  # in a list: its tables are not of the file

    def forward(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        """The hidden states [b, n, hidden] after those given, from the embeddings of the tokens after; likewise."""
        x = self.fc(torch.cat((embeds, hidden), dim=-1))
        count = x.shape[1]
        positions = torch.arange(count, device=x.device)[None]
        ahead = torch.ones(count, count, dtype=torch.bool, device=x.device).triu(1)
        mask = torch.zeros(count, count, dtype=x.dtype, device=x.device).masked_fill(ahead, torch.finfo(x.dtype).min)
        tables = self._rotary[0].to(x.device)(x, positions)
        out: Any = self.layers[0](
            x, attention_mask=mask[None, None], position_ids=positions, position_embeddings=tables, use_cache=False
        )
        state: Tensor = out[0] if isinstance(out, tuple) else out
        return state


def head_config(target: Any, intermediate: int | None = None) -> LlamaConfig:
    """The configuration of a head for a target's configuration, of a Llama or Qwen."""
    heads = target.num_attention_heads
    theta = (getattr(target, "rope_parameters", None) or {}).get("rope_theta", 10000.0)
    return LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=intermediate or target.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=getattr(target, "num_key_value_heads", None) or heads,
        head_dim=getattr(target, "head_dim", None) or target.hidden_size // heads,
        rms_norm_eps=target.rms_norm_eps,
        max_position_embeddings=target.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": float(theta)},
        attn_implementation="eager",
    )


def write_eagle1(folder: Path, head: Eagle1Head) -> None:
    """Writes the head in its dtype, as heads are published: without embedding and output matrix."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in head.state_dict().items()}
    save_file(tensors, folder / SAFETENSORS, metadata={"format": "pt"})
    own = head.config
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        **{name: getattr(own, name) for name in (*names, "rms_norm_eps", "max_position_embeddings")},
        "num_hidden_layers": 1,
        "rope_theta": own.rope_parameters["rope_theta"],
        "attention_bias": False,
        "fc_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": str(head.fc.weight.dtype).removeprefix("torch."),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def read_eagle1(folder: Path) -> Eagle1Head:
    """The head in `folder`, float32, grafted or not. Raises CheckpointError or ValueError for one of another kind."""
    tensors = Tensors(folder)
    check_eagle1(folder, tensors)
    written = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    head = Eagle1Head(head_config(LlamaConfig(**written)))
    wanted = head.state_dict()
    if more := sorted(set(tensors.files) - set(wanted) - {"embed_tokens.weight", "lm_head.weight"}):
        raise ValueError(f"{folder}: module code here runs no head with {', '.join(more[:3])}")
    head.load_state_dict({name: tensors[name].float() for name in wanted})
    return head.requires_grad_(False).eval()
