"""The dimensions of an EAGLE-3 head, which runs beside its target on the target's core."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from tandem.workshops.planning.shapes import DecoderShape, Linear, count, read_config, shape_of

TAPS = 3  # hidden states that a head reads of its target, of three layers
ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel")
"""Both public layouts, as tandem/checkpoints/head_config.py knows them."""


@dataclass(frozen=True, slots=True)
class HeadShape(DecoderShape):
    """A decoder of one layer whose attention reads twice its width, with an output matrix of `columns`.

    It reads the target's hidden states, `features` numbers a token, and the target's embedding.
    """

    columns: int = 0
    features: int = 0

    def linears(self) -> tuple[Linear, ...]:
        q, kv, h, i = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.hidden, self.intermediate
        return (
            Linear("fc", self.features, h, "columns"),
            Linear("self_attn.q_proj", 2 * h, q, "q", self.bias),
            Linear("self_attn.k_proj", 2 * h, kv, "kv", self.bias),
            Linear("self_attn.v_proj", 2 * h, kv, "kv", self.bias),
            Linear("self_attn.o_proj", q, h, "q", self.bias),
            Linear("mlp.gate_proj", h, i, "columns"),
            Linear("mlp.up_proj", h, i, "columns"),
            Linear("mlp.down_proj", i, h, "columns"),
            Linear("lm_head", h, self.columns, "columns"),
        )

    @property
    def norm_parameters(self) -> int:
        return 4 * self.hidden

    @property
    def parameters(self) -> int:
        """Number of parameters, without an embedding: a head that has its own holds that too."""
        return sum(linear.parameters for linear in self.linears()) + self.norm_parameters


def read_head_shape(folder: str, target: DecoderShape) -> HeadShape | None:
    """The shape of the head in `folder`, or None if it has none. Raises ValueError if it is not that of `target`."""
    path, config = read_config(folder, "draft_model")
    if not _is_head(config):
        return None
    try:
        return _checked(_shape(config, path.parent.name), target)
    except ValueError as error:
        raise ValueError(f"draft_model: {path}: {error}") from None


def holds_head(folder: str) -> bool:
    """Whether `folder` holds a head; False for what cannot be read, which is reported where it is loaded."""
    try:
        return _is_head(read_config(folder, "draft_model")[1])
    except ValueError:
        return False


def _is_head(config: Mapping[str, Any]) -> bool:
    named = any(name in ARCHITECTURES for name in config.get("architectures") or ())
    return named or config.get("speculators_model_type") == "eagle3"


def _shape(config: Mapping[str, Any], name: str) -> HeadShape:
    layer = config.get("transformer_layer_config") or config
    base = shape_of({"model_type": "llama", "max_position_embeddings": 2048, **layer}, name)
    own = {one.name: getattr(base, one.name) for one in fields(DecoderShape)}
    columns = count(config, "draft_vocab_size", base.vocabulary)
    return HeadShape(**own, columns=columns, features=TAPS * count(config, "target_hidden_size", base.hidden))


def _checked(head: HeadShape, target: DecoderShape) -> HeadShape:
    for name, own, wanted in (
        ("num_hidden_layers", head.layers, 1),
        ("vocab_size", head.vocabulary, target.vocabulary),
        ("target_hidden_size", head.features // TAPS, target.hidden),
    ):
        if own != wanted:
            raise ValueError(f"{name}: {own} is not {wanted}, as the target needs it")
    return head
