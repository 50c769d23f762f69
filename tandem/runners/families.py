"""The tested families of models, by model_type of config.json, and what fits a slot cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tandem.checkpoints.family_configs import table
from tandem.checkpoints.locate import CheckpointError


class UnsupportedModel(ValueError):
    """The slot cache cannot serve this model."""


def served() -> tuple[str, ...]:
    """Tested families, those of native steps first; module code serves all."""
    return (*table()["native"], *table()["module"])


def check_family(folder: str, config: Mapping[str, Any], untested: bool = False) -> None:
    """Raises CheckpointError for a family that is refused, or untested unless `untested` allows it."""
    kind = str(config.get("model_type"))[:60]
    if reason := next((reason for reason, names in table()["refused"].items() if kind in names), ""):
        raise CheckpointError(f"{folder}: model_type: nothing here serves {kind}: {reason}")
    if kind not in served() and not untested:
        raise CheckpointError(
            f"{folder}: model_type: {kind} is not among the families that were tested (docs/models.md); "
            "--untested_model tries it in module code"
        )


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
