"""Builds an EAGLE-3 head's native runner, with a local or remote target, and checks its logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tandem.checkpoints.head_config import LINEARS, NORMS
from tandem.checkpoints.head_weights import HeadWeights
from tandem.checkpoints.numbers import DTYPES as NAMES
from tandem.checkpoints.numbers import Floats, Stored, of_floats
from tandem.host.cores import default_threads
from tandem.runners.eagle.remote import RemoteHead
from tandem.runners.making import SMALL
from tandem.runners.native import NativeUnavailable
from tandem.runners.native.build import CannotBuild, library_path
from tandem.runners.native.features import NativeFeatures, features_of
from tandem.runners.native.head import NativeHead, NativeHeadRunner, linear
from tandem.runners.native.library import load_library
from tandem.runners.native.load import spread_distance
from tandem.runners.native.model import NativeModel
from tandem.runners.native.reference import Product, attended, gated, normed, rounding, split, turned
from tandem.runners.native.rotary import rotary_tables
from tandem.runners.native.runner import NativeRunner
from tandem.runners.native.steps import NotNative, Threads
from tandem.runners.native.weights import UNQUANTISED, Packing, packing
from tandem.runners.protocol import TAIL, RunnerIdentity

if TYPE_CHECKING:
    from tandem.runners.loading import Execution

# How far native logits may be from the reference's, relative to their spread. One layer in bfloat16, or with inputs in
# 8 bits, is off by 0.008; a wrong matrix by 0.1 and more.
_DENSE = {"float32": 1e-3, "bfloat16": 0.05}
_QUANTISED = 0.05
_PROBE = 12  # tokens


def load_native_head(
    head: HeadWeights,
    features: NativeFeatures,
    embedding: Stored,
    target: NativeRunner,
    execution: Execution,
    identity: RunnerIdentity,
) -> NativeHeadRunner:
    """Packs the head and checks its logits, before the target's first request. Raises NativeUnavailable."""
    dtype, packed = head_format(execution, _in_blocks(target))
    limits, threads = target.limits, target.model.threads
    try:
        most_tokens = limits.slots * TAIL + limits.chunk
        read = replace(features, embedding=embedding)
        model = NativeHead(head, dtype, read, threads, most_tokens, packed)
        check_logits(model, head)
    except NotNative as error:
        raise NativeUnavailable(str(error)) from None
    return NativeHeadRunner(model, limits, replace(identity, dtype=packed.describe(dtype), backend="native"))


def load_remote_native_head(made: RemoteHead, execution: Execution, in_blocks: bool) -> NativeHeadRunner:
    """Packs a remote target's head and checks its logits. `in_blocks`: the target's. Raises NativeUnavailable."""
    dtype, packed = head_format(execution, in_blocks)
    small, limits = made.head.parameters < SMALL, made.limits
    most_tokens = limits.slots * max(TAIL, limits.chunk) + limits.chunk  # a tail may have as many tokens as a chunk
    try:
        threads = Threads(load_library(library_path()), 1 if small else execution.threads or default_threads())
        read = made.embedding.to("bfloat16" if made.embedding.dtype == "BF16" else "float32")
        features = features_of(made.features_shape, NAMES[dtype], read.own())
        model = NativeHead(made.head, dtype, features, threads, most_tokens, packed, made.length)
        check_logits(model, made.head)
    except (NotNative, CannotBuild, OSError) as error:
        raise NativeUnavailable(str(error)) from None
    identity = replace(made.identity, dtype=packed.describe(dtype), backend="native")
    return NativeHeadRunner(model, limits, identity, made)


def head_format(execution: Execution, in_blocks: bool) -> tuple[str, Packing]:
    """A head's dtype and packing: by flags, else int8 if the target is in blocks, else the fastest dtype here."""
    from tandem.runners.loading import dtype_name

    weights, dtype = execution.weights, execution.number_format
    stays_dense = weights not in ("int8", "q4") and (dtype != "auto" or not in_blocks)
    if stays_dense:
        return dtype_name(dtype, "cpu"), UNQUANTISED
    packed = packing(weights if weights in ("int8", "q4") else "int8")
    return dtype_name("float32" if dtype == "auto" else dtype, "cpu"), packed


def _in_blocks(target: NativeRunner) -> bool:
    return isinstance(target.model, NativeModel) and target.model.packing.quantises


def check_logits(model: NativeHead, head: HeadWeights) -> float:
    """The distance of logits from the reference's, relative to their spread. Raises NotNative above a limit."""
    chance, stored = np.random.default_rng(0), model.features.stored
    tokens = chance.integers(0, model.vocab_size, _PROBE)
    values = stored.values[0, : _PROBE - 1]
    random = chance.standard_normal(values.shape, dtype=np.float32)
    values[:] = of_floats(random).to("float32" if stored.dtype == "F32" else "bfloat16").values
    try:
        model.feed([0], [0], [tokens[: _PROBE // 2].tolist()], 0)
        native = model.feed([0], [_PROBE // 2], [tokens[_PROBE // 2 :].tolist()], 1)
        own = _Reference(head, model).logits(_rounded(model, model.embedding, tokens[1:]), _rounded_all(model, values))
    finally:
        values[:] = 0
    assert native is not None
    distance = spread_distance(native, own)
    if not distance <= (_QUANTISED if model.packing.quantises else _DENSE[model.dtype]):
        raise NotNative(f"the head's logits are {distance:.3g} away from the module's own")
    return distance


def _rounded(model: NativeHead, table: Stored, which: NDArray[Any]) -> Floats:
    return rounding(model.dtype)(Stored(table.dtype, table.values[which]).floats())


def _rounded_all(model: NativeHead, values: NDArray[Any]) -> Floats:
    return rounding(model.dtype)(Stored(model.features.stored.dtype, values).floats())


class _Reference:
    def __init__(self, head: HeadWeights, model: NativeHead) -> None:
        self.config, self._round = head.config, rounding(model.dtype)
        self._dtype = model.dtype
        self._norms = [head.weight(name, model.dtype).floats() for name in NORMS]
        forms = dict.fromkeys(("fc", *LINEARS.values()), model.packing.layers) | {"lm_head": model.packing.head}
        self._products: Mapping[str, Product] = {
            name: Product(linear(head, name, model.dtype), None, form, model.library, self._round)
            for name, form in forms.items()
        }

    def logits(self, embeds: Floats, features: Floats) -> Floats:
        """float32 logits [1, draft vocabulary] after embeds [n, hidden] and features [n, 3 * hidden]."""
        of, round, dim = self._products, self._round, self.config.head_dim
        hidden, own, inner, last = self._norms
        fused = of["fc"](features)
        before = self._normed(fused, hidden)
        x = np.concatenate((self._normed(embeds, own), before), -1)
        turns = rotary_tables(self.config.rope, dim, len(x), self._dtype)
        q, k, v = (split(of[LINEARS[name]](x), dim) for name in "qkv")
        attention = attended(turned(q, turns, round), turned(k, turns, round), v, round)
        x = round((before if self.config.norm_before_residual else fused) + of[LINEARS["o"]](attention))
        passed = self._normed(x, inner)
        x = round(x + of[LINEARS["down"]](gated(of[LINEARS["gate"]](passed), of[LINEARS["up"]](passed), round)))
        return of["lm_head"](self._normed(x[-1:], last))

    def _normed(self, x: Floats, weight: Floats) -> Floats:
        return normed(x, weight, self.config.rms_norm_eps, self._round)
