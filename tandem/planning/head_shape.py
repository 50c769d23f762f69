"""The dimensions of an EAGLE-3 head, which runs beside its target on the target's core."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tandem.checkpoints.head_config import TAPS, HeadConfig, is_head, read_head_config
from tandem.planning.shapes import DecoderShape, Linear


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
    path = Path(folder)
    path = path.parent if path.name == "config.json" else path
    if not is_head(path):
        return None
    config = read_head_config(path)
    config.taps(target.layers)
    for name, own, theirs in (
        ("vocab_size", config.vocab_size, target.vocabulary),
        ("target_hidden_size", config.target_hidden_size, target.hidden),
    ):
        if own != theirs:
            raise ValueError(f"draft_model: {path}: {name} is {own}, the target's is {theirs}")
    return _shape(config, path.name)


def _shape(config: HeadConfig, name: str) -> HeadShape:
    return HeadShape(
        name=name,
        model_type="llama",
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        layers=1,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        vocabulary=config.vocab_size,
        longest=config.max_position_embeddings,
        tied=False,
        bias=config.attention_bias,
        columns=config.draft_vocab_size,
        features=TAPS * config.target_hidden_size,
    )
