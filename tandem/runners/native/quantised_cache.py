"""Quantises a checkpoint's matrices once, into blocks in the cache."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tandem.checkpoints.family_weights import EMBEDDING, HEAD, FamilyWeights, FolderWeights, matrix_name
from tandem.checkpoints.gguf_blocks import FORMATS, Blocks
from tandem.checkpoints.locate import Checkpoint, check_unchanged, weights_revision
from tandem.checkpoints.tensors import Tensors, shards_of, write_tensors
from tandem.checkpoints.trusted_cache import cache_root, made_once
from tandem.runners.native.build import CannotBuild, library_path
from tandem.runners.native.library import MATRICES, load_library
from tandem.runners.native.weights import encoded, near, packing

log = logging.getLogger("tandem.engine")
_LAYOUT = 1  # part of the folder's name; increase it when blocks are made otherwise
_SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True, slots=True)
class QuantisedWeights:
    """Matrices in blocks, in a folder's safetensors files. `names`: NAME.FORMAT of each weight."""

    tensors: Tensors
    names: Mapping[str, str]

    def formats(self) -> tuple[str, ...]:
        return tuple(sorted({name.rpartition(".")[2] for name in self.names.values()}))

    def matrix(self, layer: int, name: str) -> Blocks | None:
        return self._named(matrix_name(layer, name))

    def head(self) -> Blocks | None:
        return self._named(HEAD)

    def _named(self, name: str) -> Blocks:
        place = self.names[name]
        return Blocks(place.rpartition(".")[2], self.tensors.stored(place).values)


def quantised(checkpoint: Checkpoint, source: FamilyWeights, weights: str) -> QuantisedWeights | None:
    """The matrices in blocks of int8 or q4; None without compiler or writable cache. Raises CheckpointError."""
    wanted = _wanted(source, weights)
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
    except CannotBuild:
        return None
    except OSError as error:
        log.warning("cannot cache %s, quantised, in %s: %s", checkpoint.name, cache_root(), error)
        return None
    tensors = Tensors(kept)
    return QuantisedWeights(tensors, {place.rpartition(".")[0]: place for place in tensors.files})


def _wanted(source: FamilyWeights, weights: str) -> dict[str, tuple[str, str]]:
    packed, config = packing(weights), source.config
    names = {form.kind: name for name, form in FORMATS.items()}
    layers = [matrix_name(layer, name) for layer in range(config.num_hidden_layers) for name in MATRICES]
    head = EMBEDDING if config.tie_word_embeddings or HEAD not in source else HEAD
    return {name: (name, names[packed.layers]) for name in layers} | {HEAD: (head, names[packed.head])}


def _write(library: Any, source: FamilyWeights, wanted: Mapping[str, tuple[str, str]], folder: Path) -> None:
    def load(key: str) -> NDArray[np.uint8]:
        place, form = wanted[key.rpartition(".")[0]]
        own = None
        if form == "q8_0" and isinstance(source, FolderWeights) and place in source.scaled:
            own = source.scaled.blocks(place)
        dense = source.stored(place).floats()
        return (near(own, dense) if own else encoded(library, dense, form)).rows

    sizes = {f"{name}.{form}": 2 * math.prod(source.shape(place)) for name, (place, form) in wanted.items()}
    write_tensors(folder, shards_of(sizes, _SHARD_BYTES), load)
