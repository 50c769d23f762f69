"""Fixes rotary embeddings whose frequencies depend on a step's largest position."""

from __future__ import annotations

import logging
from typing import Any

log = logging.getLogger("tandem.engine")


def fix_rotary(module: Any, length: int) -> None:
    """Fixes longrope and dynamic frequencies at those of `length`; else tokens would depend on other rows."""
    for part in module.modules():
        kinds = getattr(part, "rope_type", None)
        if isinstance(kinds, str):
            part.rope_type = _fixed(part, kinds, length)
        elif isinstance(kinds, dict):
            part.rope_type = {layer: _fixed(part, kind, length, layer) for layer, kind in kinds.items()}


def _fixed(part: Any, kind: str, length: int, layer: str | None = None) -> str:
    # returns a kind that transformers does not update
    if kind != "longrope" and "dynamic" not in kind:
        return kind
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    buffer = getattr(part, f"{layer}_inv_freq" if layer else "inv_freq")
    buffer.copy_(ROPE_INIT_FUNCTIONS[kind](part.config, buffer.device, seq_len=length, layer_type=layer)[0])
    rope = part.config.rope_parameters[layer] if layer else part.config.rope_parameters
    original = rope.get("original_max_position_embeddings") or part.config.max_position_embeddings
    place = f"{'beyond' if length > original else 'within'} the original {original}"
    log.info("rotary embedding: %s has the frequencies of sequence_length %d, %s, for all prompts", kind, length, place)
    return "fixed"
