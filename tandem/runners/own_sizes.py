"""Chooses sequence length and KV slots if the operator names no length and slots take memory as they are written."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from tandem.checkpoints.gguf_blocks import StoredWeights
from tandem.checkpoints.gguf_family import family_of_gguf
from tandem.checkpoints.hub_files import read_configuration
from tandem.checkpoints.locate import Checkpoint
from tandem.host.cores import free_bytes, given_on_demand
from tandem.runners.families import context_length
from tandem.runners.load_runner import Execution, Shape, prepared_platform
from tandem.runners.torch.platforms import compile_order

log = logging.getLogger("tandem.engine")

SHARE = 4  # slots at full length take at most 1/SHARE of the free memory
MOST_SLOTS = 8  # certifying 16 slots at start takes 0.8 s longer than 4
ORIGINAL = "original_max_position_embeddings"
_STEP = 64  # positions that native slots have in common
_NUMBER_BYTES = 4  # of a key or value, at most


def runs_native(execution: Execution) -> bool:
    """Whether native steps run in this process, for models that have them; on the device thread."""
    return execution.tp_degree == 1 and compile_order(execution.compile, prepared_platform(execution))[0] == "native"


def own_sizes(
    execution: Execution, shape: Shape, checkpoints: Sequence[Checkpoint], more_slots: bool, head: bool = False
) -> Shape:
    """Sets length and, if `more_slots`, slots by free memory; keeps `shape` if slots are preallocated."""
    if execution.tp_degree > 1 or not given_on_demand():
        return shape
    platform = prepared_platform(execution)
    free = free_bytes()
    if platform.device != "cpu" or free is None:
        return shape
    configs = [_config(checkpoint) for checkpoint in checkpoints]
    lengths = [length for config in configs if (length := own_length(config))]
    sizes = [size for config in configs if (size := _position_bytes(config))]
    if not configs or len(lengths) < len(configs) or len(sizes) < len(configs):
        return shape
    if head:
        sizes += [5 * (_count(config, "hidden_size") or 0) * _NUMBER_BYTES for config in configs]  # 3 features, 2 keys
    room = free // SHARE // sum(sizes)
    length = min(lengths[0], max(shape.max_length, room // shape.slots // _STEP * _STEP))
    slots = max(shape.slots, min(MOST_SLOTS, room // length)) if more_slots else shape.slots
    log.info(
        "sequence length %d of the model's %d, %d slots, since no --sequence_length is given: "
        "they take up to %d MiB, as they are written",
        *(length, lengths[0], slots, slots * length * sum(sizes) // 2**20),
    )
    return replace(shape, max_length=length, slots=slots)


def draft_shape(shape: Shape, checkpoint: Checkpoint) -> Shape:
    """Limits the length to the draft's own positions, beyond which it drafts nothing."""
    most = own_length(_config(checkpoint), extended=True) or shape.max_length
    if most >= shape.max_length:
        return shape
    log.info(
        "%s has %d positions: sequences of up to %d go on without its drafts", checkpoint.name, most, shape.max_length
    )
    return replace(shape, max_length=most)


def own_length(config: dict[str, Any], extended: bool = False) -> int | None:
    """A model's positions, or None; longrope and dynamic scaling only if `extended`: they change short prompts."""
    positions = _count(config, "max_position_embeddings")
    rope = config.get("rope_scaling") or config.get("rope_parameters") or next(iter(config.get("ropes", ())), None)
    if not positions or not isinstance(rope, Mapping):
        return positions
    kind = rope.get("rope_type") or rope.get("type")
    if kind == "longrope" and not extended:
        return _count(config, ORIGINAL) or _count(rope, ORIGINAL) or positions
    return positions if kind == "dynamic" and not extended else context_length(positions, [{**rope, "rope_type": kind}])


def _config(checkpoint: Checkpoint) -> dict[str, Any]:
    # loading the model reports what is unreadable here
    try:
        if checkpoint.gguf_file:
            family = family_of_gguf(StoredWeights(checkpoint.gguf_file))
            return {each.name: getattr(family, each.name) for each in fields(family)}
        return read_configuration(checkpoint)
    except Exception as error:
        log.debug("%s: its configuration cannot be read: %s", checkpoint.name, error)
        return {}


def _position_bytes(config: dict[str, Any]) -> int | None:
    """Maximum bytes of a position's keys and values, or None."""
    layers, heads = _count(config, "num_hidden_layers"), _count(config, "num_attention_heads")
    if not (layers and heads):
        return None
    dim = _count(config, "head_dim") or (_count(config, "hidden_size") or 0) // heads
    return layers * 2 * (_count(config, "num_key_value_heads") or heads) * dim * _NUMBER_BYTES or None


def _count(config: Mapping[str, Any], name: str) -> int | None:
    value = config.get(name)
    return value if type(value) is int and 0 < value < 2**31 else None
