"""Each matrix's format: dense, in blocks made once and kept in the cache, or in a file's own blocks."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tandem.checkpoints.family_configs import MATRICES, matrix_name
from tandem.checkpoints.family_weights import EMBEDDING, HEAD, FamilyWeights, FolderWeights, GgufWeights
from tandem.checkpoints.gguf_blocks import FORMATS, Blocks
from tandem.checkpoints.locate import Checkpoint, CheckpointError, check_unchanged, weights_revision
from tandem.checkpoints.numbers import Floats, Stored
from tandem.checkpoints.tensors import Tensors, shards_of, write_tensors
from tandem.checkpoints.trusted_cache import cache_root, made_once
from tandem.runners.native import LibraryMissing
from tandem.runners.native.compilation import library_path
from tandem.runners.native.library import Matrix, load_library

log = logging.getLogger("tandem.engine")
_LAYOUT = 1  # part of the folder's name; increase it when blocks are made otherwise
_SHARD_BYTES = 5 * 10**9


Weight = Callable[[], Stored]
"""Reads a matrix's numbers in the model's dtype."""


@dataclass(frozen=True, slots=True)
class Packing:
    """`layers`, `head`: format that dense matrices are quantised to ("": none).

    `stored`: a GGUF's blocks as they are, or those that `quantised` cached, each named NAME.FORMAT.
    """

    name: str = ""
    layers: str = ""
    head: str = ""
    stored: GgufWeights | Tensors | None = None

    def describe(self, dtype: str) -> str:
        """The weights' format, then the dtype of all else: "int8/float32"."""
        return f"{'+'.join(self._names())}/{dtype}" if self.quantises else dtype

    @property
    def quantises(self) -> bool:
        return bool(self._names())

    def _names(self) -> tuple[str, ...]:
        if self.name or self.stored is None or isinstance(self.stored, Tensors):
            return (self.name,) if self.name else ()
        return self.stored.formats()

    def matrix(
        self, library: Any, layer: int, name: str, shape: tuple[int, ...], weight: Weight, bias: Stored | None = None
    ) -> tuple[Matrix, object]:
        """A linear layer, outputs by inputs, for the library, and the owner of its memory. Raises CheckpointError."""
        blocks: Blocks | None = None
        if isinstance(self.stored, Tensors):
            blocks = _cached(self.stored, matrix_name(layer, name), self.layers)
        elif self.stored is not None:
            blocks = self.stored.matrix(layer, name)
        return _matrix(library, shape, weight, bias, self.layers, blocks)

    def output(
        self, library: Any, shape: tuple[int, ...], weight: Weight, wanted: Sequence[int] | None
    ) -> tuple[Matrix, object]:
        """Like `matrix`, for rows `wanted` (None: all) of the output matrix."""
        blocks: Blocks | None = None
        if isinstance(self.stored, Tensors):
            blocks = _cached(self.stored, HEAD, self.head)
        elif self.stored is not None:
            blocks = self.stored.head()
        if wanted is None:
            return _matrix(library, shape, weight, None, self.head, blocks)
        which = np.asarray(wanted, dtype=np.int64)
        blocks = blocks and Blocks(blocks.format, np.ascontiguousarray(blocks.rows[which]))

        def narrow() -> Stored:
            whole = weight()
            return Stored(whole.dtype, whole.values[which])

        return _matrix(library, (len(which), shape[1]), narrow, None, self.head, blocks)


def _cached(tensors: Tensors, name: str, form: str) -> Blocks:
    return Blocks(form, tensors.stored(f"{name}.{form}").values)


UNQUANTISED = Packing()


def packing(weights: str, stored: GgufWeights | Tensors | None = None) -> Packing:
    """The packing by `--weights`. `stored`: blocks of a GGUF file or the cache."""
    if weights == "int8":
        return Packing(weights, "q8_0", "q8_0", stored)
    if weights == "q4":  # the head decides between neighbours: 4 bits are too few
        return Packing(weights, "q4_1", "q8_0", stored)
    return UNQUANTISED if stored is None else Packing(stored=stored)


def _matrix(
    library: Any, shape: tuple[int, ...], weight: Weight, bias: Stored | None, form: str, blocks: Blocks | None
) -> tuple[Matrix, object]:
    address = None if bias is None else bias.values.ctypes.data
    if blocks is None and form:
        blocks = encoded(library, weight().floats(), form)
    if blocks is None:
        dense = weight().values
        return Matrix(dense.ctypes.data, address, 0), (dense, bias)
    size, (outputs, inputs) = FORMATS[blocks.format], shape
    if blocks.rows.shape != (outputs, -(-inputs // size.inputs) * size.bytes):
        raise CheckpointError(f"a matrix of {shape} is stored as {blocks.rows.shape} bytes of {blocks.format}")
    return Matrix(blocks.rows.ctypes.data, address, size.kind), (bias, blocks)


def encoded(library: Any, weight: Floats, form: str) -> Blocks:
    """A matrix float32 [outputs, inputs] in blocks of "q8_0" or "q4_1". Raises CheckpointError."""
    dense, size = np.ascontiguousarray(weight, dtype=np.float32), FORMATS[form]
    outputs, inputs = dense.shape
    rows = np.empty((outputs, -(-inputs // size.inputs) * size.bytes), dtype=np.uint8)
    library.tandem_encode(size.kind, outputs, inputs, dense.ctypes.data, rows.ctypes.data)
    factors = rows.reshape(outputs, -1, size.bytes)[..., : 4 if form == "q4_1" else 2].copy().view(np.float16)
    if not (np.isfinite(factors).all() and np.isfinite(dense.sum(dtype=np.float64))):
        raise CheckpointError(f"a matrix of {dense.shape} cannot be quantised: weights too large, or no numbers")
    return Blocks(form, rows)


def quantised(checkpoint: Checkpoint, source: FamilyWeights, weights: str) -> Tensors | None:
    """The matrices in blocks of int8 or q4; None without compiler or writable cache. Raises CheckpointError."""
    packed, config = packing(weights), source.config
    layers = [matrix_name(layer, name) for layer in range(config.num_hidden_layers) for name in MATRICES]
    head = EMBEDDING if config.tie_word_embeddings or HEAD not in source else HEAD
    wanted = {name: (name, packed.layers) for name in layers} | {HEAD: (head, packed.head)}
    if any(place not in source for place, _ in wanted.values()):
        return None
    revision = weights_revision(checkpoint)
    key = hashlib.sha256(revision.encode()).hexdigest()[:32]
    name = f"{checkpoint.name.replace('/', '-')}-{key}-{weights}-v{_LAYOUT}"
    try:
        library = load_library(library_path())

        def make(partial: Path) -> None:
            _write(library, source, wanted, partial)
            check_unchanged(checkpoint, revision)

        kept = made_once(cache_root(), name, f"quantising {checkpoint.name}", make)
    except LibraryMissing:
        return None
    except OSError as error:
        log.warning("cannot cache %s, quantised, in %s: %s", checkpoint.name, cache_root(), error)
        return None
    return Tensors(kept)


def _write(library: Any, source: FamilyWeights, wanted: Mapping[str, tuple[str, str]], folder: Path) -> None:
    def load(key: str) -> NDArray[np.uint8]:
        place, form = wanted[key.rpartition(".")[0]]
        own = None
        if form == "q8_0" and isinstance(source, FolderWeights) and place in source.scaled:
            own = source.scaled.blocks(place)
        return (own or encoded(library, source.stored(place).floats(), form)).rows

    sizes = {f"{name}.{form}": 2 * math.prod(source.shape(place)) for name, (place, form) in wanted.items()}
    write_tensors(folder, shards_of(sizes, _SHARD_BYTES), load)
