"""Reads weights by module name, multiplied by their scales."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tandem.checkpoints.gguf_blocks import FORMATS, Blocks
from tandem.checkpoints.locate import CheckpointError
from tandem.checkpoints.numbers import Floats, Stored, of_floats
from tandem.checkpoints.quantisation import FP8, INT8, Scheme, Tile, quantisation_of
from tandem.checkpoints.tensors import Tensors, dtypes

if TYPE_CHECKING:
    from torch import Tensor

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
        for name, dtype in dtypes(file).items():
            if name.endswith(".weight") and dtype in _BYTES:
                raise CheckpointError(f"{file}: {name} is {dtype}, and config.json has no quantization_config")


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
