"""The EAGLE-3 head (Li et al. 2025) as a torch module, with SpecForge's parameter names, and its folders.

A row's inputs are the embedding of token t_j (j >= 1) and the target's feature at position j - 1, or the head's own
state of the row before; its logits predict t_(j+1).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from tandem.checkpoints.head_config import EMBEDDING, TAPS, HeadConfig, HeadWeights, write_head_config
from tandem.checkpoints.locate import CheckpointError, first_line
from tandem.checkpoints.tensors import SAFETENSORS, save_tensors
from tandem.runners.eagle.hidden_states import tensor_of


def llama_config(head: HeadConfig) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=head.vocab_size,
        hidden_size=head.hidden_size,
        intermediate_size=head.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=head.num_attention_heads,
        num_key_value_heads=head.num_key_value_heads,
        head_dim=head.head_dim,
        rms_norm_eps=head.rms_norm_eps,
        max_position_embeddings=head.max_position_embeddings,
        attention_bias=head.attention_bias,
        rope_parameters=dict(head.rope),
    )


class HeadAttention(nn.Module):
    """Attention's projections, with inputs twice as wide as the head."""

    def __init__(self, head: HeadConfig) -> None:
        super().__init__()
        wide, own = head.num_attention_heads * head.head_dim, head.num_key_value_heads * head.head_dim
        bias = head.attention_bias
        self.q_proj = nn.Linear(2 * head.hidden_size, wide, bias=bias)
        self.k_proj = nn.Linear(2 * head.hidden_size, own, bias=bias)
        self.v_proj = nn.Linear(2 * head.hidden_size, own, bias=bias)
        self.o_proj = nn.Linear(wide, head.hidden_size, bias=bias)


class HeadMlp(nn.Module):
    def __init__(self, head: HeadConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(head.hidden_size, head.intermediate_size, bias=False)
        self.up_proj = nn.Linear(head.hidden_size, head.intermediate_size, bias=False)
        self.down_proj = nn.Linear(head.intermediate_size, head.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class HeadLayer(nn.Module):
    def __init__(self, head: HeadConfig) -> None:
        super().__init__()
        self.self_attn, self.mlp = HeadAttention(head), HeadMlp(head)
        self.hidden_norm = LlamaRMSNorm(head.hidden_size, head.rms_norm_eps)
        self.input_layernorm = LlamaRMSNorm(head.hidden_size, head.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(head.hidden_size, head.rms_norm_eps)


class EagleHead(nn.Module):
    """The head without attention, which `eagle_runner.py` computes over slots and training over a sequence."""

    d2t: Tensor  # int64 [draft vocabulary]: logits column c is token c + d2t[c]
    t2d: Tensor  # bool [vocabulary]: tokens with a column

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(TAPS * config.target_hidden_size, config.hidden_size, bias=False)
        self.midlayer = HeadLayer(config)
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.arange(config.vocab_size) < config.draft_vocab_size)
        self._rotary: Any = [LlamaRotaryEmbedding(llama_config(config))]  # in a list: its tables are not of the file

    @property
    def token_ids(self) -> Tensor:
        """Tokens of the logits columns, int64 [draft vocabulary]."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def narrow_to(self, ids: Tensor) -> None:
        """Makes the columns those of `ids`, ascending [draft vocabulary]."""
        self.d2t.copy_(ids - torch.arange(len(ids), device=ids.device))
        self.t2d.zero_()
        self.t2d[ids] = True

    def turns(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotary cosines and sines [..., head_dim] at positions [..., ]."""
        cosines, sines = self._rotary[0].to(positions.device)(self.fc.weight, positions)
        return cosines, sines

    def fuse(self, features: Tensor) -> Tensor:
        """The target's features [..., 3 * target hidden] as one input [..., hidden]."""
        fused: Tensor = self.fc(features)
        return fused

    def project(self, embeds: Tensor, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Residual [rows, width, hidden]; queries, keys, values [rows, heads, width, head_dim]."""
        layer, attention = self.midlayer, self.midlayer.self_attn
        normed = layer.hidden_norm(hidden)
        x = torch.cat((layer.input_layernorm(embeds), normed), dim=-1)
        parts = (attention.q_proj(x), attention.k_proj(x), attention.v_proj(x))
        q, k, v = (part.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2) for part in parts)
        cosines, sines = self._rotary_on(x.device)(x, positions)
        q, k = apply_rotary_pos_emb(q, k, cosines, sines)
        return normed if self.config.norm_before_residual else hidden, q, k, v

    def _rotary_on(self, device: torch.device) -> Any:
        # not in a graph, where a move would write the tables at every step
        rotary = self._rotary[0]
        return rotary if rotary.inv_freq.device == device else rotary.to(device)

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Hidden state [rows, width, hidden] from attended values [rows, heads, width, head_dim]."""
        residual = residual + self.midlayer.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
        out: Tensor = residual + self.midlayer.mlp(self.midlayer.post_attention_layernorm(residual))
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., draft vocabulary] of hidden states [..., hidden]."""
        out: Tensor = self.lm_head(self.norm(hidden))
        return out


def head_module(folder: Path, weights: HeadWeights) -> EagleHead:
    """Raises CheckpointError."""
    try:
        made = EagleHead(weights.config)
    except Exception as error:  # of transformers, about the configuration's rotary embedding
        raise CheckpointError(f"{folder}: config.json: {first_line(error)[:200]}") from None
    tensors = {name: tensor_of(stored) for name, stored in weights.tensors.items()}
    made.load_state_dict({**tensors, "d2t": tensors["d2t"].long(), "t2d": tensors["t2d"].bool()}, assign=True)
    return made.requires_grad_(False).eval()


def write_head(folder: Path, head: EagleHead, embedding: Tensor | None = None) -> None:
    """Writes the head in its dtype, in SpecForge's layout. Without `embedding` loaders use the target's."""
    folder.mkdir(parents=True, exist_ok=True)
    write_head_config(folder, head.config, str(head.fc.weight.dtype).removeprefix("torch."))
    tensors = head.state_dict()
    if embedding is not None:
        tensors[EMBEDDING] = embedding
    kept = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    save_tensors(folder / SAFETENSORS, kept)
