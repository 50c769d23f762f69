"""Builds a NativeRunner and checks its logits against numpy's."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tandem.checkpoints.family import FamilyConfig
from tandem.checkpoints.family_weights import FamilyWeights, check_complete
from tandem.checkpoints.numbers import Floats, Stored
from tandem.runners.families import check_fits
from tandem.runners.native import LibraryMissing, NativeUnavailable
from tandem.runners.native.build import CannotBuild, library_path
from tandem.runners.native.certificate import certificate
from tandem.runners.native.library import load_library
from tandem.runners.native.model import NativeModel, check
from tandem.runners.native.reference import PARTS, Product, Reference, chance_inputs, columns, side_by_side
from tandem.runners.native.rotary import BY_LENGTH
from tandem.runners.native.runner import NativeRunner
from tandem.runners.native.steps import NotNative, Threads
from tandem.runners.native.weights import UNQUANTISED, Packing
from tandem.runners.protocol import TAIL, Limits, RunnerIdentity

log = logging.getLogger("tandem.engine")

# How far native logits may be from the reference's, relative to their spread. bfloat16 is off by about 0.03; a wrong
# formula by 0.3 and more.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}
# With activations in 8 bits the last bits of a sum may decide between two numbers, and one such difference makes others
# in every matrix behind it: 30 layers are 0.1 apart in float32 and 0.18 in bfloat16. So the whole is held to this, and
# each packed matrix alone, whose input is the same on both sides, to what the last additions round.
QUANTISED = 0.25
PRODUCT = {"float32": 1e-5, "bfloat16": 6e-3}
_PROBE, _PROBES = 12, 3  # tokens, and sequences


@dataclass(frozen=True, slots=True)
class Distances:
    """Distances from the reference: of logits, and of the worst packed matrix (0: none)."""

    logits: float
    products: float


def load_native(
    weights: FamilyWeights,
    dtype: str,
    threads: int,
    limits: Limits,
    identity: RunnerIdentity,
    verifies: bool,
    draft_vocab: Sequence[int] | None,
    packing: Packing = UNQUANTISED,
    recertify: bool | None = None,
) -> NativeRunner:
    """Compiles the library if necessary, packs weights, checks logits. Raises NativeUnavailable."""
    try:
        check(weights.config, dtype)
        check_fits(weights.config, limits.max_length)
        check_complete(weights)
        length = limits.max_length + max(limits.max_draft + 1, limits.chunk)
        most_tokens = limits.slots * max(limits.max_draft + 1, TAIL, 1) + limits.chunk
        library = library_path()
        passed = None
        if recertify is not None:
            passed = certificate(identity, library, threads, limits, verifies, draft_vocab, again=recertify)
        pool = Threads(load_library(library), threads)
        longest = limits.max_length
        model = NativeModel(weights, dtype, pool, limits.slots, length, most_tokens, draft_vocab, packing, longest)
        _say_ropes(weights.config, longest)
        if not (passed and passed.holds):
            check_steps(model, weights)
    except CannotBuild as error:
        raise LibraryMissing(str(error)) from None
    except (NotNative, OSError) as error:
        raise NativeUnavailable(str(error)) from None
    return NativeRunner(model, limits, identity, verifies, passed)


def _say_ropes(config: FamilyConfig, longest: int) -> None:
    for kind in sorted({rope["rope_type"] for rope in config.ropes} & set(BY_LENGTH)):
        log.info("rotary embedding %s: its frequencies are those of sequences of %d positions, always", kind, longest)


def check_steps(model: NativeModel, weights: FamilyWeights) -> Distances:
    """Compares matrices and logits with the reference. Raises NotNative beyond the rounding error."""
    least = QUANTISED if model.packing.quantises else TOLERANCE[model.dtype]
    for seed in range(_PROBES):
        found = _compared(model, weights, np.random.default_rng(seed))
        if found.logits <= least:
            return found
    raise NotNative(f"the steps' logits are {found.logits:.3g} away from the model's own")


def _compared(model: NativeModel, weights: FamilyWeights, chance: np.random.Generator) -> Distances:
    reference = Reference(weights, model.dtype, model.packing, model.library, model.configured)
    tokens = chance.integers(0, model.vocab_size, _PROBE)
    worst, x = 0.0, reference.embedded(Stored(model.embedding.dtype, model.embedding.values[tokens]))
    for index in range(weights.config.num_hidden_layers):
        matrices = reference.layer(index)
        for part, names in enumerate(PARTS):
            distance = _product_distance(model, index, part, [matrices[name] for name in names], names, chance)
            worst = max(worst, distance)
        x = reference.passed(index, matrices, x)
    head = reference.head(model.embedding)
    worst = max(worst, _product_distance(model, -1, 0, [head], ("head",), chance))
    own = columns(reference.last(head(reference.last_norm(x))), model.draft_vocab)
    native = model.feed([0], [0], [tokens.tolist()])
    assert native is not None
    return Distances(spread_distance(native, own), worst)


def spread_distance(native: Floats, own: Floats) -> float:
    """The distance of logits [n, outputs] relative to their spread."""
    return float(np.linalg.norm(native - own) / np.linalg.norm(own - own.mean(-1, keepdims=True)))


def _product_distance(
    model: NativeModel,
    layer: int,
    part: int,
    made: Sequence[Product],
    names: Sequence[str],
    chance: np.random.Generator,
) -> float:
    if not model.packing.quantises:
        return 0.0
    x = chance_inputs(chance, made[0].inputs, model.dtype)
    outputs = [product(x.floats()) for product in made]
    own = columns(outputs[0], model.draft_vocab) if layer < 0 else side_by_side(names, outputs)
    off, size = float(np.linalg.norm(model.product(layer, part, x, own.shape[1]) - own)), float(np.linalg.norm(own))
    if not off <= PRODUCT[model.dtype] * size:
        where = "the head" if layer < 0 else f"{', '.join(names)} of layer {layer}"
        raise NotNative(f"products of {where} are {off / max(size, 1e-30):.3g} away from those of its weights")
    return off / max(size, 1e-30)
