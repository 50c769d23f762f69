"""What a head's features paid for: acceptance gained over the draft model, against bytes from target to draft."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HEADED, MODEL = "distributed_head", "distributed"


def head_line(found: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Returns a sentence about an EAGLE-3 head and a draft model under one condition; None unless both drafted.

    `found`: as in the `architectures` of a condition in comparison.json.
    """
    head, model = found.get(HEADED), found.get(MODEL)
    if head is None or model is None or not (head["drafted"] and model["drafted"]):
        return None
    paid, before = head["bytes_down_per_token"], model["bytes_down_per_token"]
    if None in (paid, before):
        return None
    gained = head["mean_acceptance_length"] - model["mean_acceptance_length"]
    line = (
        f"head against draft model: accepted {head['acceptance_rate']:.3f} against {model['acceptance_rate']:.3f},"
        f" {head['mean_acceptance_length']:.2f} against {model['mean_acceptance_length']:.2f} tokens a round"
        f" ({gained:+.2f}), for {paid:,.0f} bytes a token down instead of {before:,.0f}"
    )
    if gained > 0:
        line += f": {(paid - before) / gained:,.0f} bytes a token for each token more in a round"
    return line
