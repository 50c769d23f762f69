"""Reads config.json's quantisation: integers or FP8 times scales."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.checkpoints.json_files import read_object
from tandem.checkpoints.locate import CheckpointError, first_line

INT8, FP8 = "int8", "float8_e4m3fn"
METHODS = ("compressed-tensors", "fbgemm_fp8", "fp8")
FORMATS = ("int-quantized", "float-quantized", "naive-quantized")
"""Formats of compressed-tensors with one byte a number; others pack several."""
_KINDS = {"int": INT8, "float": FP8}
_STRATEGIES = ("tensor", "channel", "group", "block")
Tile = tuple[int | None, int | None]


@dataclass(frozen=True, slots=True)
class Scheme:
    """Dtypes with a scale per `tile` of outputs and inputs; None in a tile: all."""

    numbers: str
    tile: Tile


class _Unsupported(ValueError):
    """A field has a value that is not supported; the message names both."""


def quantisation_of(folder: Path) -> tuple[Scheme, ...] | None:
    """Returns the possible schemes, chosen by a matrix's scale shape; None if dense. Raises CheckpointError."""
    file = folder / "config.json"
    try:
        config = read_object(file)
        for name in ("quantization_config", "compression_config"):  # the second: of early compressed-tensors
            if found := config.get(name):
                return tuple(_schemes(name, found))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: {first_line(error)[:300]}") from None
    return None


def _schemes(name: str, config: Any) -> Iterator[Scheme]:
    config = _object(name, config)
    method = _one_of(f"{name}.quant_method", config.get("quant_method"), METHODS)
    if method == "fbgemm_fp8":
        yield Scheme(FP8, (1, None))
    elif method == "fp8":
        _one_of(f"{name}.fmt", config.get("fmt", "e4m3"), ("e4m3",))
        size = config.get("weight_block_size")
        yield Scheme(FP8, (None, None) if size is None else _tile(f"{name}.weight_block_size", size))
    else:
        yield from _compressed(name, config)


def _compressed(name: str, config: Mapping[str, Any]) -> Iterator[Scheme]:
    _one_of(f"{name}.quantization_status", config.get("quantization_status", "compressed"), ("compressed",))
    sparsity = _object(f"{name}.sparsity_config", config.get("sparsity_config") or {})
    _one_of(f"{name}.sparsity_config.format", sparsity.get("format", "dense"), ("dense",))
    if config.get("transform_config"):
        raise _Unsupported(f"{name}.transform_config: transforms of activations are not supported")
    groups = _object(f"{name}.config_groups", config.get("config_groups"))
    if not groups:
        raise _Unsupported(f"{name}.config_groups: names no group")
    for group in groups:
        place = f"{name}.config_groups.{group}"
        settings = _object(place, groups[group])
        own = settings.get("format")
        _one_of(f"{place if own else name}.format", own or config.get("format"), FORMATS)
        if weights := settings.get("weights"):
            yield _weights(f"{place}.weights", _object(f"{place}.weights", weights))


def _weights(place: str, weights: Mapping[str, Any]) -> Scheme:
    _one_of(f"{place}.num_bits", weights.get("num_bits"), (8,))
    _one_of(f"{place}.symmetric", weights.get("symmetric", True), (True,))
    _one_of(f"{place}.actorder", weights.get("actorder"), (None, "weight", "static"))  # "group" reorders the inputs
    numbers = _KINDS[_one_of(f"{place}.type", weights.get("type", "int"), tuple(_KINDS))]
    strategy = _one_of(f"{place}.strategy", weights.get("strategy"), _STRATEGIES)
    if strategy == "block":
        return Scheme(numbers, _tile(f"{place}.block_structure", weights.get("block_structure")))
    if strategy == "group":
        return Scheme(numbers, (1, _count(f"{place}.group_size", weights.get("group_size"))))
    return Scheme(numbers, (None if strategy == "tensor" else 1, None))


def _one_of(place: str, value: Any, known: tuple[Any, ...]) -> Any:
    if value not in known or isinstance(value, bool) != isinstance(known[0], bool):
        raise _Unsupported(f"{place}: {value!r:.60} is not {' or '.join(map(str, known))}")
    return value


def _object(place: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise _Unsupported(f"{place}: {value!r:.60} is not an object")
    return value


def _tile(place: str, value: Any) -> Tile:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise _Unsupported(f"{place}: {value!r:.60} is not two sizes")
    return _count(place, value[0]), _count(place, value[1])


def _count(place: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _Unsupported(f"{place}: {value!r:.60} is not a positive whole number")
    return value
