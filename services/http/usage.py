"""Counts an answer's tokens, and says what speculation did, as OpenAI and vLLM do."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from tandem.speculation.types import GenerationEnd


def usage(prompt: int, output: int, ends: Sequence[GenerationEnd], firsts: Sequence[GenerationEnd]) -> dict[str, Any]:
    """Builds `usage`. `firsts`: the ends of each prompt's first choice, whose cached tokens count."""
    accepted, drafted = sum(each.stats.accepted for each in ends), sum(each.stats.drafted for each in ends)
    shown = sum(min(each.stats.accepted, each.output_tokens) for each in ends)  # a stop may cut the last round's
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": sum(each.stats.cached_prompt_tokens for each in firsts)},
        "completion_tokens_details": {
            "accepted_prediction_tokens": shown,
            "rejected_prediction_tokens": drafted - accepted,
        },
    }


def metrics(ends: Sequence[GenerationEnd], most: int) -> dict[str, Any]:
    """Builds vLLM's `metrics` (pull request 48915), of rounds with at least one draft token; nothing without any."""
    accepted, drafted = _by_position(ends, "accepted_per_position"), _by_position(ends, "drafted_per_position")
    steps = drafted[0] if drafted else 0
    if not steps:
        return {}
    at_least = [steps, *accepted, 0]
    told = {
        "mean_acceptance_length": 1 + sum(accepted) / steps,
        "draft_acceptance_rate": sum(accepted) / sum(drafted),
        "acceptance_histogram": [n - more for n, more in itertools.pairwise(at_least)],
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": sum(accepted),
        "num_draft_tokens": sum(drafted),
        "num_spec_tokens": most,
    }
    return {"metrics": {"speculative_decoding": told}}


def _by_position(ends: Sequence[GenerationEnd], name: str) -> list[int]:
    lists = [getattr(each.stats, name) for each in ends]
    return [sum(each[i] for each in lists if i < len(each)) for i in range(max(map(len, lists), default=0))]
