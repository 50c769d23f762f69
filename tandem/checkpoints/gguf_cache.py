"""Unpacks GGUF files for module code and graphs, once per hash: float32 weights (exact) and tokenizer."""

from __future__ import annotations

import json
import logging
import math
import re
from pathlib import Path
from typing import Any

import numpy as np

from tandem.checkpoints.family_weights import GgufWeights, check_complete, shapes
from tandem.checkpoints.gguf_family import FREQUENCIES, config_of_gguf
from tandem.checkpoints.locate import Checkpoint, CheckpointError, check_sizes, check_unchanged, weights_revision
from tandem.checkpoints.numbers import Floats
from tandem.checkpoints.tensors import shards_of, write_tensors
from tandem.checkpoints.tokenizers import write_tokenizer
from tandem.checkpoints.trusted_cache import cache_root, made_once

log = logging.getLogger("tandem.engine")
_SHARD_BYTES = 4 << 30
_LAYOUT = 4  # part of the folder's name; increase it when the folder's content changes


def unpacked(checkpoint: Checkpoint) -> Checkpoint:
    """Returns a GGUF checkpoint unpacked, others unchanged."""
    if checkpoint.gguf is None:
        return checkpoint
    revision = weights_revision(checkpoint)
    key = revision.split(":")[1]

    def make(partial: Path) -> None:
        convert(checkpoint, partial)
        check_unchanged(checkpoint, revision)

    try:
        folder = made_once(cache_root(), f"{checkpoint.name}-{key}-v{_LAYOUT}", f"unpacking {checkpoint.gguf}", make)
    except OSError as error:
        raise CheckpointError(
            f"{checkpoint.gguf} cannot be unpacked into {cache_root()} (TANDEM_CACHE): {error}"
        ) from None
    return Checkpoint(checkpoint.name, str(folder), revision=revision, packed=str(checkpoint.gguf_file))


def convert(checkpoint: Checkpoint, folder: Path) -> None:
    """Writes weights in float32, configuration and tokenizer. Raises CheckpointError for what transformers lacks."""
    file = checkpoint.gguf_file
    if file is None:
        raise CheckpointError(f"{checkpoint.folder}: no GGUF file")
    check_sizes(checkpoint)
    try:
        weights = GgufWeights(file)
        check_complete(weights)
        config = _spelt(config_of_gguf(weights.blocks), weights.config.biases)
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{file}: {error}") from None
    names = _tensors(weights)

    def load(name: str) -> Any:
        return np.concatenate([_as_spelt(weights, part) for part in names[name]])

    sizes = {name: sum(4 * math.prod(weights.shape(part)) for part in parts) for name, parts in names.items()}
    write_tensors(folder, shards_of(sizes, _SHARD_BYTES), load)
    write_tokenizer(checkpoint, folder)
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "float32"}, indent=2) + "\n", encoding="utf-8")


def _spelt(config: dict[str, Any], biases: frozenset[str]) -> dict[str, Any]:
    kind, ropes = config["model_type"], config["rope_parameters"]
    if "freq_factors" in ropes:
        raise CheckpointError(f"{FREQUENCIES}: rotary factors of a GGUF file are served by native steps alone")
    by_class = {
        "qwen2": ({*"qkv"},),
        "stablelm": (set(), {*"qkv"}),
        "mistral": (set(),),
        "phi3": (set(),),
        "seed_oss": ({*"qkv"},),
    }
    usual: tuple[set[str], ...] = (set(), {*"qkvo"}, {*"qkvo", "gate", "up", "down"}, {"gate", "up", "down"})
    if set(biases) not in by_class.get(kind, usual):
        raise CheckpointError(
            f"biases of {', '.join(sorted(biases)) or 'none'} in {kind} are served by native steps alone"
        )
    flags = {"attention_bias": "o" in biases, "mlp_bias": "up" in biases, "use_qkv_bias": "q" in biases}
    return {**config, **{name: True for name, given in flags.items() if given and kind != "qwen2"}}


def _tensors(weights: GgufWeights) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for name in shapes(weights.config):
        together = name
        if weights.config.model_type == "phi3":
            together = re.sub(r"\.(q|k|v)_proj\.", ".qkv_proj.", re.sub(r"\.(gate|up)_proj\.", ".gate_up_proj.", name))
        found[together] = (*found.get(together, ()), name)
    return found


def _as_spelt(weights: GgufWeights, name: str) -> Floats:
    # Gemma's norms are offsets from 1 in transformers.
    floats = weights.stored(name).floats()
    is_offset = weights.config.model_type.startswith("gemma") and name.endswith("norm.weight")
    return floats - np.float32(1) if is_offset else floats
