"""Quantises the matrices of a checkpoint once, into blocks in the cache: later starts read a quarter of the bytes."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.checkpoints.gguf_blocks import FORMATS, Blocks
from tandem.checkpoints.locate import Checkpoint, CheckpointError, check_unchanged, weights_revision
from tandem.checkpoints.made_once import made_once
from tandem.checkpoints.scaled_weights import ScaledWeights
from tandem.checkpoints.tensors import Tensors, shards_of, write_tensors
from tandem.checkpoints.trusted_cache import cache_root
from tandem.runners.native.build import CannotBuild, library_path
from tandem.runners.native.library import MATRICES, load_library
from tandem.runners.native.model import FAMILY
from tandem.runners.native.weights import encoded, near, packing

log = logging.getLogger("tandem.engine")
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_LAYOUT = 1  # part of the folder's name; increase it when blocks are made otherwise
_SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True, slots=True)
class QuantisedWeights:
    """Matrices in blocks, by their modules' names: NAME.FORMAT in the safetensors files of a folder."""

    tensors: Tensors
    names: Mapping[str, str]

    @property
    def modules(self) -> Collection[str]:
        """The names of its matrices in the model."""
        return self.names.keys()

    def formats(self) -> tuple[str, ...]:
        return tuple(sorted({name.rpartition(".")[2] for name in self.names.values()}))

    def matrix(self, layer: int, name: str) -> Blocks | None:
        return self._named(_name_of(layer, name))

    def head(self) -> Blocks | None:
        return self._named(HEAD)

    def _named(self, name: str) -> Blocks:
        place = self.names[name]
        return Blocks(place.rpartition(".")[2], self.tensors[place].numpy())


def quantised(checkpoint: Checkpoint, folder: Path, config: Any, weights: str) -> QuantisedWeights | None:
    """The matrices of a checkpoint in the blocks of `weights`, int8 or q4; `folder` has its files.

    None where they cannot be made or kept: the model is none of the native steps', or named otherwise; there is no
    compiler; the cache cannot be written to. Raises CheckpointError.
    """
    if config.model_type not in FAMILY:
        return None
    try:
        source = ScaledWeights(folder)
    except CheckpointError:  # of a hub, in PyTorch's files
        return None
    wanted = _wanted(source, config, weights)
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

        kept = made_once(name, f"quantising {checkpoint.name}", make)
    except CannotBuild:
        return None
    except OSError as error:
        log.warning("cannot cache %s, quantised, in %s: %s", checkpoint.name, cache_root(), error)
        return None
    tensors = Tensors(kept)
    return QuantisedWeights(tensors, {place.rpartition(".")[0]: place for place in tensors.files})


def _wanted(source: ScaledWeights, config: Any, weights: str) -> dict[str, tuple[str, str]]:
    """What each matrix is made from, and its format."""
    packed = packing(weights)
    names = {form.kind: name for name, form in FORMATS.items()}
    layers = [_name_of(layer, name) for layer in range(config.num_hidden_layers) for name in MATRICES]
    head = EMBEDDING if config.tie_word_embeddings or HEAD not in source else HEAD
    return {name: (name, names[packed.layers]) for name in layers} | {HEAD: (head, names[packed.head])}


def _name_of(layer: int, name: str) -> str:
    part = "self_attn" if name in "qkvo" else "mlp"
    return f"model.layers.{layer}.{part}.{name}_proj.weight"


def _write(library: Any, source: ScaledWeights, wanted: Mapping[str, tuple[str, str]], folder: Path) -> None:
    import torch

    def load(key: str) -> torch.Tensor:
        place, form = wanted[key.rpartition(".")[0]]
        own = source.blocks(place) if form == "q8_0" else None
        return torch.from_numpy((near(own, source[place]) if own else encoded(library, source[place], form)).rows)

    sizes = {f"{name}.{form}": source.bytes(place) for name, (place, form) in wanted.items()}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # with two, waiting after each small operation took ten times as long
    try:
        write_tensors(folder, shards_of(sizes, _SHARD_BYTES), load)
    finally:
        torch.set_num_threads(threads)
