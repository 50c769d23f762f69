"""Says whether a model fits a slot cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class UnsupportedModel(ValueError):
    """The slot cache cannot serve this model."""


def stretched(positions: int | None, rope: Any) -> int | None:
    """The positions that a model's `positions` become by the scaling of its rotary embedding, yarn or dynamic."""
    said = rope if isinstance(rope, Mapping) else {}
    factor, kind = said.get("factor"), said.get("rope_type", said.get("type"))
    if not positions or kind not in ("yarn", "dynamic") or not isinstance(factor, int | float):
        return positions
    return max(positions, int(factor * (said.get("original_max_position_embeddings") or positions)))


def check_fits(config: Any, max_length: int, ranks: int = 1) -> None:
    """Raises UnsupportedModel unless each layer attends to `max_length` positions, or a window of them.

    `ranks` must divide the heads.
    """
    heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    if heads % ranks:
        raise UnsupportedModel(f"tp_degree: {ranks} does not divide the model's {heads} key-value heads")
    ropes = getattr(config, "ropes", None) or (getattr(config, "rope_parameters", None),)
    positions = stretched(getattr(config, "max_position_embeddings", None), ropes[0])
    if windows := [each for each in getattr(config, "windows", ()) if 0 < each < max_length]:
        raise UnsupportedModel(
            f"attention with a window of {windows[0]} does not fit a slot cache of {max_length} tokens"
        )
    if positions and max_length > positions:
        raise UnsupportedModel(f"sequence_length: {max_length} is above the model's {positions} positions")
    kinds = set(getattr(config, "layer_types", None) or ())
    if others := kinds - {"full_attention", "sliding_attention"}:
        raise UnsupportedModel(f"attention of kind {', '.join(sorted(others))} does not fit a slot cache")
    if getattr(config, "attention_chunk_size", None):
        raise UnsupportedModel("models with attention_chunk_size are not supported")
