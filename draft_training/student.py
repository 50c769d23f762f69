"""The draft's shape, and where its weights start: the target's embeddings in fewer dimensions, fresh layers.

A plain Llama with tied embeddings, because every loader knows one. On a small draft the embeddings are most of the
bytes, so the hidden size is set by the file's size and the feed-forward width takes what is left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class StudentConfig:
    hidden: int = 160
    layers: int = 2
    heads: int = 5
    feed_forward: int = 1024

    def __post_init__(self) -> None:
        for name in ("hidden", "layers", "heads", "feed_forward"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name.replace('_', '-')}: {getattr(self, name)} is below 1")
        if self.hidden % (2 * self.heads):
            raise ValueError(f"heads: {self.heads} heads of even size do not make a hidden size of {self.hidden}")


def build(target: Any, config: StudentConfig, counts: Tensor, seed: int) -> Any:
    """A student for `target`. `counts` [vocabulary] says how often the target said each token."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    theirs = target.config
    student = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=theirs.vocab_size,
            hidden_size=config.hidden,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.heads,
            intermediate_size=config.feed_forward,
            max_position_embeddings=theirs.max_position_embeddings,
            tie_word_embeddings=True,
            rms_norm_eps=1e-5,
            bos_token_id=theirs.bos_token_id,
            eos_token_id=theirs.eos_token_id,
            pad_token_id=theirs.pad_token_id,
        )
    )
    head = target.get_output_embeddings().weight.detach().float()
    student.get_input_embeddings().weight.data.copy_(_reduced(head, counts.float(), config.hidden))
    for layer in student.model.layers:  # residual branches start small, as in GPT-2 (Radford et al. 2019)
        layer.self_attn.o_proj.weight.data /= (2 * config.layers) ** 0.5
        layer.mlp.down_proj.weight.data /= (2 * config.layers) ** 0.5
    return student


def _reduced(embeddings: Tensor, counts: Tensor, hidden: int) -> Tensor:
    """The principal directions of `embeddings` [vocabulary, d], tokens weighted by how often they are said."""
    weights = (counts + 1).sqrt()
    weights = weights / weights.sum()
    centred = embeddings - (weights[:, None] * embeddings).sum(0)
    covariance = centred.T @ (weights[:, None] * centred)
    values, directions = torch.linalg.eigh(covariance)
    kept = directions[:, values.argsort(descending=True)[:hidden]]
    if kept.shape[1] < hidden:
        kept = torch.nn.functional.pad(kept, (0, hidden - kept.shape[1]))
    reduced = centred @ kept
    return reduced * (0.05 / reduced.std())
