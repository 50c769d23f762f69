"""The C interface of api.cpp: structures (of model.h and linear.h), signatures, arrays. Calls release the GIL."""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Callable, Sequence
from ctypes import POINTER, c_double, c_float, c_int, c_int32, c_int64, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from tandem.checkpoints.family_configs import MATRICES
from tandem.runners.native import NativeUnavailable
from tandem.runners.protocol import RowFailed

Ints = ctypes.Array[c_int32]  # created and passed in a tenth of numpy's time, which every step pays
FAULTS = {
    1: "its slot does not exist",
    2: "its positions are outside the slot",
    3: "a token id is outside the vocabulary",
    4: "its adapter does not exist",
    5: "its number of draft tokens is out of range",
    6: "it has no tokens, or does not fit",
    7: "an argument is out of range",
}
_ROWS = 16  # FAULTS of api.cpp: a status is this times the row, plus the fault


class OutOfBounds(ValueError):
    """A library call exceeds its models. `row`: the first at fault."""

    def __init__(self, call: str, status: int) -> None:
        self.row, fault = divmod(status, _ROWS)
        self.why = FAULTS[fault]
        super().__init__(f"{call}: row {self.row}: {self.why}")


def each_alone(step: Callable[[Any, Any], Any]) -> Callable[[Any, Any], list[Any]]:
    """A step of a runner: rows that are out of bounds fail alone."""

    @functools.wraps(step)
    def run(runner: Any, rows: Sequence[Any]) -> list[Any]:
        if not rows:
            return []
        try:
            return [*step(runner, rows)]
        except OutOfBounds as error:
            found = run(runner, [*rows[: error.row], *rows[error.row + 1 :]])
            return [*found[: error.row], RowFailed(error.why), *found[error.row :]]

    return run


class ModelShape(ctypes.Structure):
    """Shape of model.h. `outputs`, `vocabulary`: rows of head and embedding. Zeros after `scale`: a Llama."""

    _fields_ = (
        *((name, c_int32) for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate")),
        *((name, c_int32) for name in ("outputs", "vocabulary", "slots", "length", "most_tokens", "threads")),
        *((name, c_float) for name in ("epsilon", "scale", "norm_offset", "attention_cap", "logit_cap")),
        *((name, c_float) for name in ("embedding_scale", "residual_scale", "logit_scale")),
        *((name, c_int32) for name in ("activation", "layer_norm", "rounds_once", "row_norms", "wide_rope")),
        ("short_cache", c_int32),
    )


class Matrix(ctypes.Structure):
    _fields_ = (("weights", c_void_p), ("bias", c_void_p), ("format", c_int32))


NORMS = ("before_attention", "before_mlp", "q_norm", "k_norm", "after_attention", "after_mlp")


class LayerWeights(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in NORMS),
        *((name, Matrix) for name in MATRICES),
        *((name, c_void_p) for name in ("cosines", "sines")),
        *((name, c_int32) for name in ("turned", "window")),
    )


class LowRankPointers(ctypes.Structure):
    _fields_ = (("down", c_void_p), ("up", c_void_p), ("rank", c_int32), ("scale", c_float))


class LayerAdapter(ctypes.Structure):
    _fields_ = tuple((name, LowRankPointers) for name in MATRICES)


class Rows(ctypes.Structure):
    """A ragged batch: row r feeds tokens[begins[r] : begins[r + 1]] to slot slots[r] from position starts[r]."""

    _fields_ = (
        ("count", c_int32),
        *((name, POINTER(c_int32)) for name in ("slots", "starts", "begins", "tokens", "adapters")),
        *((name, POINTER(c_int32)) for name in ("feature_counts", "quiet")),
    )


class StoredRows(ctypes.Structure):
    _fields_ = (("rows", c_void_p), ("width", c_int32), ("wide", c_int32))


class HeadInputs(ctypes.Structure):
    _fields_ = (
        *((name, StoredRows) for name in ("embedding", "features")),
        *((name, c_int32) for name in ("length", "residual_normed", "kept_states")),
        ("hidden_norm", c_void_p),
        ("fuse", Matrix),
    )


# callback: (row, place of its logits, argmax token or -1) to the next draft token; -1 ends the draft
DRAW = ctypes.CFUNCTYPE(c_int32, c_int32, c_int32, c_int32)


class Sampling(ctypes.Structure):
    """Sampling of model.h: how a row's tokens are drawn; all zeros: not."""

    _fields_ = (
        *((name, c_double) for name in ("temperature", "top_p", "min_p")),
        *(("seed", c_uint64), ("position", c_int64), ("top_k", c_int32), ("tokens", c_int32)),
    )


class Drawing(ctypes.Structure):
    """Drawing of model.h: the callback for rows marked in `rows`, and a buffer for logits."""

    _fields_ = (
        *(("rows", POINTER(c_int32)), ("sampled", POINTER(Sampling)), ("logits", POINTER(c_float)), ("draw", DRAW)),
        ("least", POINTER(c_float)),
    )


def ints(values: Sequence[int]) -> Ints:
    return (c_int32 * len(values))(*values)


def zeros(count: int) -> Ints:
    return (c_int32 * count)()


def pointer(array: NDArray[Any] | None, of: type) -> Any:
    """A pointer to an array's data; None for None."""
    return None if array is None else array.ctypes.data_as(POINTER(of))


class RowBatch:
    """Rows and the arrays that they point to."""

    def __init__(
        self,
        slots: Sequence[int],
        starts: Sequence[int],
        tokens: Sequence[Sequence[int]],
        adapters: Sequence[int] = (),
        feature_counts: Sequence[int] | None = None,
    ) -> None:
        """Raises ValueError if lists differ in length: the library would read beyond them."""
        if not len(slots) == len(starts) == len(tokens) == len(feature_counts or tokens) == len(adapters or tokens):
            raise ValueError("rows: each has a slot, a start, tokens, and an adapter and features where any has")
        self.begins = ints([0, *itertools.accumulate(len(row) for row in tokens)])
        self.tokens = ints([*itertools.chain.from_iterable(tokens)])
        self.rows = Rows(
            len(tokens),
            ints(slots),
            ints(starts),
            self.begins,
            self.tokens,
            ints(adapters) if any(adapters) else None,
            None if feature_counts is None else ints(feature_counts),
        )


_INTS, _FLOATS = POINTER(c_int32), POINTER(c_float)


class _Status:
    pass


_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "tandem_instructions": (ctypes.c_char_p, ()),
    "tandem_pool": (c_void_p, (c_int,)),
    "tandem_pool_free": (None, (c_void_p,)),
    "tandem_model": (c_void_p, (c_void_p, c_int, POINTER(ModelShape), c_void_p)),
    "tandem_model_free": (None, (c_void_p,)),
    "tandem_set_layer": (c_int, (c_void_p, c_int, POINTER(LayerWeights))),
    "tandem_set_head": (c_int, (c_void_p, c_void_p, POINTER(Matrix))),
    "tandem_read_features": (c_int, (c_void_p, POINTER(HeadInputs))),
    "tandem_hand_out": (_Status, (c_void_p, _INTS, c_int, c_void_p)),
    "tandem_put_adapter": (c_int, (c_void_p, c_int)),
    "tandem_set_adapter_layer": (c_int, (c_void_p, c_int, c_int, POINTER(LayerAdapter))),
    "tandem_weight_bytes": (c_int64, (c_void_p,)),
    "tandem_page_bytes": (c_int64, (c_void_p,)),
    "tandem_slot_bytes": (c_int64, (c_void_p, c_int)),
    "tandem_give_back": (_Status, (c_void_p, c_int, c_int)),
    "tandem_copy_pages": (_Status, (c_void_p, *(c_int,) * 3, _INTS, c_void_p, c_int, c_int)),
    "tandem_encode": (_Status, (c_int, c_int, c_int, c_void_p, c_void_p)),
    "tandem_feed": (_Status, (c_void_p, POINTER(Rows), c_int, POINTER(c_float))),
    "tandem_propose": (_Status, (c_void_p, POINTER(Rows), _INTS, _INTS, c_int, _INTS, POINTER(Drawing))),
    "tandem_logprobs": (_Status, (c_void_p, POINTER(c_void_p), c_int, c_int, c_int, POINTER(c_double), _INTS)),
    "tandem_draw": (_Status, (c_void_p, _FLOATS, c_int, _INTS, POINTER(Sampling), _INTS)),
    "tandem_verify": (_Status, (c_void_p, POINTER(Rows), POINTER(Sampling), _INTS, _INTS, _FLOATS)),
    "tandem_fused": (
        _Status,
        (
            *(c_void_p, c_void_p, POINTER(Rows), *[_INTS] * 4, c_int, c_int, _INTS, POINTER(Sampling), *[_INTS] * 2),
            *(_FLOATS, POINTER(Drawing), POINTER(c_double)),
        ),
    ),
}


def load_library(path: Path) -> Any:
    """A model and its pool allow one thread at a time. Raises NativeUnavailable; calls raise OutOfBounds."""
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeUnavailable(str(error)) from None
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes = arguments
        if result is _Status:
            function.restype, function.errcheck = c_int, _checked
        else:
            function.restype = result
    return library


def _checked(status: int, function: Any, arguments: Any) -> int:
    if status:
        raise OutOfBounds(function.__name__, status) if status > 0 else MemoryError(function.__name__)
    return status
