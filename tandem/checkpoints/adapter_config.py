"""Reads a LoRA adapter's adapter_config.json (PEFT)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tandem.checkpoints.json_files import read_object
from tandem.checkpoints.locate import CheckpointError

CONFIG = "adapter_config.json"
MOST_RANK = 512
MOST_ALPHA = 2.0**16
_MOST_PATTERN = 512  # characters
_MOST_BYTES = 1 << 20  # a pattern for each layer of the largest models takes a tenth

# Fields that say where an adapter comes from or which layers it was made for. What it changes is in its tensors.
_HARMLESS = {
    *(
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "ensure_weight_tying",
        "eva_config",
        "exclude_modules",
    ),
    *("inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout", "lora_ga_config"),
    *("megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config", "target_modules"),
    *("task_type", "use_dora_cache"),
}
_READ = {
    *("alpha_pattern", "bias", "init_lora_weights", "lora_alpha", "peft_type", "r", "rank_pattern", "use_rslora"),
    "fan_in_fan_out",
}
# What changes more than a linear layer's output by two small products.
_REFUSED = {
    "alora_invocation_tokens": "an adapter that works from some token on (aLoRA)",
    "fan_in_fan_out": "weights of Conv1D layers",
    "layer_replication": "a model with repeated layers",
    "lora_bias": "biases",
    "modules_to_save": "whole modules beside the adapter",
    "target_parameters": "parameters outside linear layers",
    "trainable_token_indices": "changed embeddings",
    "use_dora": "DoRA, which also scales the model's own weights",
    "use_qalora": "QA-LoRA, which pools inputs",
}
# Other ways to start training (pissa, olora, corda, ...) change the model's own weights too.
_STARTS = (True, False, "gaussian", "eva", "orthogonal")


Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """`ranks`, `alphas`: overrides by module pattern. `by_root`: scale alpha / sqrt(rank). Raises ValueError."""

    rank: int
    alpha: float
    by_root: bool = False
    ranks: Mapping[str, int] = field(default_factory=dict)
    alphas: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, rank in (("r", self.rank), *((f"rank_pattern {key!r:.80}", r) for key, r in self.ranks.items())):
            if type(rank) is not int or not 1 <= rank <= MOST_RANK:
                raise ValueError(f"{name}: {rank!r:.60} is not a number from 1 to {MOST_RANK}")
        patterned = ((f"alpha_pattern {key!r:.80}", alpha) for key, alpha in self.alphas.items())
        for name, alpha in (("lora_alpha", self.alpha), *patterned):
            if type(alpha) not in (int, float) or not abs(alpha) <= MOST_ALPHA:
                raise ValueError(f"{name}: {alpha!r:.60} is not a number of at most {MOST_ALPHA:g}")
        for name, patterns in (("rank_pattern", self.ranks), ("alpha_pattern", self.alphas)):
            for pattern in patterns:
                _check_pattern(name, pattern)

    def rank_and_scale(self, module: str) -> tuple[int, float]:
        """Returns rank and scale for a path such as model.layers.0.self_attn.q_proj."""
        rank, alpha = _matched(self.ranks, module, self.rank), _matched(self.alphas, module, self.alpha)
        return rank, alpha / (math.sqrt(rank) if self.by_root else rank)


def _matched(values: Mapping[str, Value], module: str, default: Value) -> Value:
    # PEFT's rule: the first pattern that matches.
    found = (value for pattern, value in values.items() if re.match(rf"(.*\.)?({pattern})$", module))
    return next(found, default)


def _check_pattern(name: str, pattern: str) -> None:
    if len(pattern) > _MOST_PATTERN:
        raise ValueError(f"{name}: {pattern[:60]!r} is longer than {_MOST_PATTERN} characters")
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{name}: {pattern[:80]!r}: {error}") from None


def read_config(folder: Path) -> AdapterConfig:
    file = folder / CONFIG
    try:
        fields = read_object(file, _MOST_BYTES)
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: no adapter: it has no {CONFIG}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from None
    try:
        _check_served(fields)
        return AdapterConfig(
            fields.get("r", 8),
            fields.get("lora_alpha", 8),
            _flag(fields, "use_rslora"),
            _patterns(fields, "rank_pattern"),
            _patterns(fields, "alpha_pattern"),
        )
    except ValueError as error:
        raise CheckpointError(f"{file}: {error}") from None


def _check_served(fields: Mapping[str, Any]) -> None:
    if fields.get("peft_type") != "LORA":
        raise ValueError(f"peft_type: {fields.get('peft_type')!r:.60} is not served, only LORA")
    for name, what in _REFUSED.items():
        if fields.get(name):
            raise ValueError(f"{name}: not served: {what}")
    if fields.get("bias", "none") != "none":
        raise ValueError(f"bias: {fields['bias']!r:.60} is not served: biases")
    start = fields.get("init_lora_weights", True)
    if start not in _STARTS:
        raise ValueError(f"init_lora_weights: {start!r:.60} is not served: it changes the model's own weights")
    for name, value in fields.items():
        if value and name not in _HARMLESS | _READ:
            raise ValueError(
                f"{name[:60]!r}: {str(value)[:60]!r} is not known here, so it may change what the adapter adds"
            )


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name) or False
    if type(value) is not bool:
        raise ValueError(f"{name}: {value!r:.60} is neither true nor false")
    return value


def _patterns(fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = fields.get(name) or {}
    if not isinstance(value, dict):
        raise ValueError(f"{name}: {str(value)[:60]!r} is not an object")
    return value
