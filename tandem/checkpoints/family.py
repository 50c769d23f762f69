"""A decoder's configuration for native steps: sizes and layer formula."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
ROPE: Mapping[str, Any] = MappingProxyType({"rope_type": "default", "rope_theta": 10000.0})
NO_ROPE = -1


class UnsupportedFamily(ValueError):
    """Native steps cannot compute a model; the message names family or field."""


@dataclass(frozen=True, slots=True)
class Norms:
    """kind: "rms" or "layer" (LayerNorm with bias). offset: added to weights (Gemma: 1).

    rounds_once: only the weighted product is rounded (Gemma, OLMo2). before, after: attention and MLP norm their
    inputs, outputs (after: Gemma 2, OLMo2). heads: norm of queries and keys: "", "head" (per head, weight [head_dim])
    or "row" (all heads, OLMo2).
    """

    kind: str = "rms"
    offset: float = 0.0
    rounds_once: bool = False
    before: bool = True
    after: bool = False
    heads: str = ""


@dataclass(frozen=True, slots=True)
class FamilyConfig:
    """A model's sizes and formula.

    ropes: transformers' `rope_parameters`, with `freq_factors` [head_dim / 2] of GGUF; rope_of_layer: indices, NO_ROPE
    (SmolLM3); empty: the first. windows: positions visible per layer, own included, 0 for all; empty: all.
    attention_scale None: head_dim ** -0.5. attention_cap, logit_cap: soft caps, 0: none. residual_scale: of what is
    added to the residual stream. parallel: MLP and attention read the same input. wide_rope: rotation in float32,
    rounded once (OLMo2).
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    biases: frozenset[str] = frozenset()
    norms: Norms = Norms()
    ropes: tuple[Mapping[str, Any], ...] = (ROPE,)
    rope_of_layer: tuple[int, ...] = ()
    windows: tuple[int, ...] = ()
    attention_scale: float | None = None
    attention_cap: float = 0.0
    logit_cap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    parallel: bool = False
    wide_rope: bool = False
    eos: tuple[int, ...] = field(default=())

    @property
    def norm_names(self) -> dict[str, str]:
        names = {}
        if self.norms.before:
            names["before_attention"] = "input_layernorm"
            if not self.parallel:
                names["before_mlp"] = "pre_feedforward_layernorm" if self.norms.after else "post_attention_layernorm"
        if self.norms.after:
            names |= {"after_attention": "post_attention_layernorm", "after_mlp": "post_feedforward_layernorm"}
        return names

    def shape(self, name: str) -> tuple[int, int]:
        """Returns outputs and inputs of q, k, v, o, gate, up or down."""
        queries, keys = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        outputs = {"q": queries, "k": keys, "v": keys, "gate": self.intermediate_size, "up": self.intermediate_size}
        inputs = {"o": queries, "down": self.intermediate_size}
        return outputs.get(name, self.hidden_size), inputs.get(name, self.hidden_size)

    def rope_of(self, layer: int) -> int:
        return self.rope_of_layer[layer] if self.rope_of_layer else 0

    def window_of(self, layer: int) -> int:
        return self.windows[layer] if self.windows else 0

    @property
    def parameters(self) -> int:
        """Counts a tied output matrix once."""
        layer = sum(outputs * inputs for outputs, inputs in map(self.shape, MATRICES))
        tables = 1 if self.tie_word_embeddings else 2
        return self.num_hidden_layers * layer + tables * self.vocab_size * self.hidden_size
