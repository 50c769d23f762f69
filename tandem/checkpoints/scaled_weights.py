"""Reads weights by module name, multiplied by their scales."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tandem.checkpoints.gguf_blocks import FORMATS, Blocks
from tandem.checkpoints.json_files import an_object, count, read_object
from tandem.checkpoints.locate import CheckpointError, first_line
from tandem.checkpoints.numbers import Floats, Stored, of_floats
from tandem.checkpoints.tensors import SafetensorsFile, Tensors

if TYPE_CHECKING:
    from torch import Tensor

INT8, FP8 = "int8", "float8_e4m3fn"
METHODS = ("compressed-tensors", "fbgemm_fp8", "fp8")
_PLAIN = ("int-quantized", "float-quantized", "naive-quantized")
"""Formats of compressed-tensors with one byte a number; others pack several."""
_KINDS = {"int": INT8, "float": FP8}
_STRATEGIES = ("tensor", "channel", "group", "block")
Tile = tuple[int | None, int | None]


@dataclass(frozen=True, slots=True)
class Scheme:
    """Dtypes with a scale per `tile` of outputs and inputs; None in a tile: all."""

    numbers: str
    tile: Tile


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
    config = an_object(name, config)
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
    sparsity = an_object(f"{name}.sparsity_config", config.get("sparsity_config") or {})
    _one_of(f"{name}.sparsity_config.format", sparsity.get("format", "dense"), ("dense",))
    if config.get("transform_config"):
        raise ValueError(f"{name}.transform_config: transforms of activations are not supported")
    groups = an_object(f"{name}.config_groups", config.get("config_groups"))
    if not groups:
        raise ValueError(f"{name}.config_groups: names no group")
    for group in groups:
        place = f"{name}.config_groups.{group}"
        settings = an_object(place, groups[group])
        own = settings.get("format")
        _one_of(f"{place if own else name}.format", own or config.get("format"), _PLAIN)
        if weights := settings.get("weights"):
            yield _weights(f"{place}.weights", an_object(f"{place}.weights", weights))


def _weights(place: str, weights: Mapping[str, Any]) -> Scheme:
    _one_of(f"{place}.num_bits", weights.get("num_bits"), (8,))
    _one_of(f"{place}.symmetric", weights.get("symmetric", True), (True,))
    _one_of(f"{place}.actorder", weights.get("actorder"), (None, "weight", "static"))  # "group" reorders the inputs
    numbers = _KINDS[_one_of(f"{place}.type", weights.get("type", "int"), tuple(_KINDS))]
    strategy = _one_of(f"{place}.strategy", weights.get("strategy"), _STRATEGIES)
    if strategy == "block":
        return Scheme(numbers, _tile(f"{place}.block_structure", weights.get("block_structure")))
    if strategy == "group":
        return Scheme(numbers, (1, count(f"{place}.group_size", weights.get("group_size"))))
    return Scheme(numbers, (None if strategy == "tensor" else 1, None))


def _one_of(place: str, value: Any, known: tuple[Any, ...]) -> Any:
    if value not in known or isinstance(value, bool) != isinstance(known[0], bool):
        raise ValueError(f"{place}: {value!r:.60} is not {' or '.join(map(str, known))}")
    return value


def _tile(place: str, value: Any) -> Tile:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError(f"{place}: {value!r:.60} is not two sizes")
    return count(place, value[0]), count(place, value[1])


Shape = tuple[int, ...]
_BYTES = ("I8", "U8", "F8_E4M3", "F8_E5M2")
SCALES = ("_scale", "_scale_inv")  # weights are multiplied by either
_NAMES = {"I8": INT8, "U8": "uint8", "F8_E4M3": FP8, "F8_E5M2": "float8_e5m2", "I32": "int32", "I64": "int64"}
_GROUP = FORMATS["q8_0"].inputs


class ScaledWeights:
    """`quantisation` None: dense."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.quantisation = folder, quantisation_of(folder)
        self._tensors = Tensors(folder)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors.files

    def names(self) -> list[str]:
        scales = {f"{name}{end}" for name in self._tensors.files for end in SCALES}
        return [name for name in self._tensors.files if name not in scales]

    def __getitem__(self, name: str) -> Tensor:
        import torch

        stored = self._tensors.stored(name)
        return self._tensors[name] if _is_dense(stored) else torch.from_numpy(self.stored(name).values)

    def stored(self, name: str) -> Stored:
        """Returns a weight; a quantised one times its scales in float32. Raises CheckpointError."""
        stored = self._tensors.stored(name)
        if _is_dense(stored):
            return stored
        scale, tile = self._scale(name, stored)
        return of_floats(stored.floats() * _spread(scale, tile, stored.shape))

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors.shape(name)

    def blocks(self, name: str) -> Blocks | None:
        """Returns the exact weight as Q8_0 blocks with float16 scales; None for FP8 or other scales."""
        stored = self._tensors.stored(name)
        if stored.dtype != "I8":
            return None
        scale, tile = self._scale(name, stored)
        outputs, inputs = stored.shape
        if tile[1] is not None and tile[1] % _GROUP:
            return None
        if not np.abs(scale).max() <= np.finfo(np.float16).max:
            raise CheckpointError(f"{self.folder}: the scales of {name} are not within float16")
        count = -(-inputs // _GROUP)
        numbers = np.pad(stored.values, ((0, 0), (0, count * _GROUP - inputs))).reshape(outputs, count, _GROUP)
        of_groups = _spread(scale, (tile[0], tile[1] and tile[1] // _GROUP), (outputs, count)).astype("<f2")
        made = np.concatenate([of_groups[..., None].view(np.uint8), numbers.view(np.uint8)], axis=-1)
        return Blocks("q8_0", made.reshape(outputs, -1))

    def _scale(self, name: str, stored: Stored) -> tuple[Floats, Tile]:
        # float32 [rows of tiles, columns of tiles]
        dtype = _NAMES.get(stored.dtype, stored.dtype)
        if self.quantisation is None:
            raise CheckpointError(f"{self.folder}: {name} is {dtype}, and config.json has no quantization_config")
        if len(stored.shape) != 2 or dtype not in (INT8, FP8):
            raise CheckpointError(f"{self.folder}: {name} is {dtype} {stored.shape}: no matrix in int8 or FP8")
        scale_name = next((name + end for end in SCALES if name + end in self), None)
        if scale_name is None:
            raise CheckpointError(f"{self.folder}: {name} is {dtype}, and there is no {name}{SCALES[0]}")
        scale = self._tensors.stored(scale_name).floats()
        tile = _tile_of(self.quantisation, dtype, stored.shape, scale.shape)
        if tile is None:
            raise CheckpointError(
                f"{self.folder}: {scale_name} is {scale.shape}: not what config.json says of {dtype} {stored.shape}"
            )
        return scale.reshape(_tiles(tile, stored.shape)), tile


def _is_dense(stored: Stored) -> bool:
    return stored.is_float and not stored.dtype.startswith("F8")


def check_dense(folder: Path) -> None:
    for file in sorted(folder.glob("*.safetensors")):
        opened = SafetensorsFile(file)
        for name in opened.names:
            if name.endswith(".weight") and opened.dtype(name) in _BYTES:
                raise CheckpointError(
                    f"{file}: {name} is {opened.dtype(name)}, and config.json has no quantization_config"
                )


def _tile_of(schemes: Sequence[Scheme], dtype: str, shape: Shape, scales: Shape) -> Tile | None:
    # A matrix with one output needs no second scale dimension.
    for scheme in schemes:
        rows, columns = _tiles(scheme.tile, shape)
        shapes = [(rows, columns), *([(rows,)] if columns == 1 else []), *([()] if rows == columns == 1 else [])]
        if scheme.numbers == dtype and scales in shapes:
            return scheme.tile
    return None


def _tiles(tile: Tile, shape: Shape) -> tuple[int, int]:
    rows, columns = (1 if size is None else -(-extent // size) for size, extent in zip(tile, shape, strict=True))
    return rows, columns


def _spread(scale: Floats, tile: Tile, shape: Shape) -> Floats:
    for dimension, (size, extent) in enumerate(zip(tile, shape, strict=True)):
        scale = np.repeat(scale, size or extent, dimension).take(range(extent), dimension)
    return scale
