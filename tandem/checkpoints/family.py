"""The configuration of a decoder that native steps can compute: its sizes, and the form of its layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
ROPE: Mapping[str, Any] = MappingProxyType({"rope_type": "default", "rope_theta": 10000.0})
NO_ROPE = -1


class UnsupportedFamily(ValueError):
    """Native steps cannot compute a model; the message names the family or the field."""


@dataclass(frozen=True, slots=True)
class Norms:
    """The norms of a decoder.

    kind: "rms", or "layer" (LayerNorm, with a bias). offset: added to each weight (Gemma: 1). rounds_once: the product
    with the weight is rounded, not the normalised value before it as well (Gemma, OLMo2). before: attention and MLP
    read normed inputs. after: their outputs are normed before they are added (Gemma 2, OLMo2). heads: queries and keys
    are normed: "" not at all, "head" each head with one weight [head_dim], "row" all heads together (OLMo2).
    """

    kind: str = "rms"
    offset: float = 0.0
    rounds_once: bool = False
    before: bool = True
    after: bool = False
    heads: str = ""


@dataclass(frozen=True, slots=True)
class FamilyConfig:
    """Sizes and formula of a model.

    ropes: the model's rotary embeddings, each as `rope_parameters` of transformers; rope_of_layer: which of them a
    layer has, NO_ROPE for none (SmolLM3); empty: all have the first. windows: for each layer, how many positions
    attention sees, its own among them, 0 for all; empty: all layers see all. eos: ids that end a sequence. biases: the
    matrices of MATRICES that have one. attention_scale: of scores; None: head_dim ** -0.5. attention_cap, logit_cap:
    the soft caps of scores and of logits, 0 for none. embedding_scale, residual_scale: multiply the embedding and what
    is added to the residual stream; logit_scale multiplies logits. parallel: the MLP reads what attention reads.
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
    eos: tuple[int, ...] = field(default=())

    @property
    def norm_names(self) -> dict[str, str]:
        """What transformers calls the norms of a layer, by their places: before and after attention and the MLP."""
        names = {}
        if self.norms.before:
            names["before_attention"] = "input_layernorm"
            if not self.parallel:
                names["before_mlp"] = "pre_feedforward_layernorm" if self.norms.after else "post_attention_layernorm"
        if self.norms.after:
            names |= {"after_attention": "post_attention_layernorm", "after_mlp": "post_feedforward_layernorm"}
        return names

    def shape(self, name: str) -> tuple[int, int]:
        """Outputs and inputs of the matrix q, k, v, o, gate, up or down of a layer."""
        queries, keys = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        outputs = {"q": queries, "k": keys, "v": keys, "gate": self.intermediate_size, "up": self.intermediate_size}
        inputs = {"o": queries, "down": self.intermediate_size}
        return outputs.get(name, self.hidden_size), inputs.get(name, self.hidden_size)

    @property
    def parameters(self) -> int:
        """The number of weights in matrices and tables; a tied output matrix counts once."""
        layer = sum(outputs * inputs for outputs, inputs in map(self.shape, MATRICES))
        tables = 1 if self.tie_word_embeddings else 2
        return self.num_hidden_layers * layer + tables * self.vocab_size * self.hidden_size
