"""Fixes rotary embeddings whose frequencies would follow the largest position of a step."""

from __future__ import annotations

import logging
from typing import Any

log = logging.getLogger("tandem.engine")


def fix_rotary(module: Any, length: int) -> None:
    """Fixes the frequencies of longrope and of dynamic scaling at those of `length` positions, and says so.

    Otherwise tokens would depend on other rows, on drafts and on chunks, and keys in the cache on when they were made.
    """
    for part in module.modules():
        kinds = getattr(part, "rope_type", None)
        if isinstance(kinds, str):
            part.rope_type = _fixed(part, kinds, length)
        elif isinstance(kinds, dict):
            part.rope_type = {layer: _fixed(part, kind, length, layer) for layer, kind in kinds.items()}


def _fixed(part: Any, kind: str, length: int, layer: str | None = None) -> str:
    """Fixes frequencies of `kind`; returns the kind from now on, which transformers does not update."""
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
