"""Whether a model fits a slot cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class UnsupportedModel(ValueError):
    """The slot cache cannot serve this model."""


def context_length(positions: int, ropes: Sequence[Mapping[str, Any]]) -> int:
    """A model's positions, as extended by its rotary embeddings."""
    seen = {"yarn": "original_max_position_embeddings", "dynamic": "max_position_embeddings"}
    factors = [
        float(rope.get("factor") or 1) * (rope.get(seen[kind]) or positions)
        for rope in ropes
        if (kind := str(rope.get("rope_type"))) in seen
    ]
    return max([positions, *map(int, factors)])


def check_fits(config: Any, max_length: int, ranks: int = 1) -> None:
    """Raises UnsupportedModel unless each layer attends to `max_length` positions or a window; `ranks` divide heads."""
    heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    if heads % ranks:
        raise UnsupportedModel(f"tp_degree: {ranks} does not divide the model's {heads} key-value heads")
    positions = getattr(config, "max_position_embeddings", None)
    ropes = getattr(config, "ropes", None) or [getattr(config, "rope_parameters", None) or {}]
    positions = positions and context_length(positions, ropes)
    if positions and max_length > positions:
        raise UnsupportedModel(f"sequence_length: {max_length} is above the model's {positions} positions")
    kinds = set(getattr(config, "layer_types", None) or ())
    if others := kinds - {"full_attention", "sliding_attention"}:
        raise UnsupportedModel(f"attention of kind {', '.join(sorted(others))} does not fit a slot cache")
    if getattr(config, "attention_chunk_size", None):
        raise UnsupportedModel("models with attention_chunk_size are not supported")
