"""Each matrix's format: dense, quantised when loaded, or as stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tandem.checkpoints.gguf_blocks import FORMATS, Blocks
from tandem.checkpoints.locate import CheckpointError
from tandem.checkpoints.numbers import Floats, Stored
from tandem.runners.native.library import Matrix

DENSE = 0
_NUMBERS = 1 << 22  # weights that are compared at a time
_TINY = 2.0**-18  # scales in float16 are whole multiples of 2**-24
INT8 = FORMATS["q8_0"].kind
Q4 = FORMATS["q4_1"].kind


class BlockSource(Protocol):
    """Matrices in blocks: of a GGUF file, or quantised before."""

    def formats(self) -> tuple[str, ...]:
        """Format names, sorted."""

    def matrix(self, layer: int, name: str) -> Blocks | None:
        """Matrix q, k, v, o, gate, up or down of a layer; None: dense. Raises CheckpointError."""

    def head(self) -> Blocks | None:
        """The output matrix, like `matrix`."""


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """Outputs by inputs. `weight` reads the numbers in the model's dtype."""

    shape: tuple[int, int]
    weight: Callable[[], Stored]
    bias: Stored | None = None

    def only(self, which: NDArray[np.int64]) -> Linear:
        def weight() -> Stored:
            whole = self.weight()
            return Stored(whole.dtype, whole.values[which])

        bias = self.bias and Stored(self.bias.dtype, self.bias.values[which])
        return Linear((len(which), self.shape[1]), weight, bias)


@dataclass(frozen=True, slots=True)
class Packing:
    name: str = ""  # of the formats
    layers: int = DENSE  # GGML format for dense weights; 0: dense
    head: int = DENSE  # the same
    stored: BlockSource | None = None  # blocks packed as they are

    def describe(self, dtype: str) -> str:
        """The weights' format, then the dtype of all else: "int8/float32"."""
        return f"{'+'.join(self._names())}/{dtype}" if self.quantises else dtype

    @property
    def quantises(self) -> bool:
        return bool(self._names())

    def _names(self) -> tuple[str, ...]:
        return (self.name,) if self.name else self.stored.formats() if self.stored else ()

    def matrix(self, layer: int, name: str, linear: Linear) -> tuple[Matrix, object]:
        """A linear layer for the library, and the owner of its memory. Raises CheckpointError."""
        return _matrix(linear, self.layers, self.stored.matrix(layer, name) if self.stored else None)

    def output(self, head: Linear, wanted: Sequence[int] | None) -> tuple[Matrix, object]:
        """Like `matrix`, for rows `wanted` (None: all) of the output matrix."""
        blocks = self.stored.head() if self.stored else None
        if wanted is not None:
            which = np.asarray(wanted, dtype=np.int64)
            blocks = blocks and Blocks(blocks.format, np.ascontiguousarray(blocks.rows[which]))
            head = head.only(which)
        return _matrix(head, self.head, blocks)


UNQUANTISED = Packing()


def packing(weights: str, stored: BlockSource | None = None) -> Packing:
    """The packing by `--weights`. `stored`: blocks of a GGUF file or the cache."""
    if weights == "int8":
        return Packing(weights, INT8, INT8, stored)
    if weights == "q4":  # the head decides between neighbours: 4 bits are too few
        return Packing(weights, Q4, INT8, stored)
    return UNQUANTISED if stored is None else Packing(stored=stored)


def _matrix(linear: Linear, packed: int, blocks: Blocks | None) -> tuple[Matrix, object]:
    bias = None if linear.bias is None else linear.bias.values
    address = None if bias is None else bias.ctypes.data
    if blocks is None:
        weight = linear.weight().values
        return Matrix(weight.ctypes.data, address, DENSE, packed), (weight, bias)
    form, (outputs, inputs) = FORMATS[blocks.format], linear.shape
    if blocks.rows.shape != (outputs, -(-inputs // form.inputs) * form.bytes):
        raise CheckpointError(f"a matrix of {linear.shape} is stored as {blocks.rows.shape} bytes of {blocks.format}")
    return Matrix(blocks.rows.ctypes.data, address, form.kind, form.kind), (bias, blocks)


def encoded(library: Any, weight: Floats, form: str) -> Blocks:
    """A matrix float32 [outputs, inputs] in blocks of "q8_0" or "q4_1"."""
    dense, size = np.ascontiguousarray(weight, dtype=np.float32), FORMATS[form]
    outputs, inputs = dense.shape
    rows = np.empty((outputs, -(-inputs // size.inputs) * size.bytes), dtype=np.uint8)
    library.tandem_encode(size.kind, outputs, inputs, dense.ctypes.data, rows.ctypes.data)
    return near(Blocks(form, rows), dense)


def near(blocks: Blocks, dense: Floats) -> Blocks:
    """The blocks, if near enough to the weights float32 [outputs, inputs]. Raises CheckpointError.

    Q8_0: each weight is within half a step. Q4_1: a block's squared error is at most that of its whole range kept, with
    half a step and the minimum's rounding.
    """
    at_once = max(1, _NUMBERS // dense.shape[1])
    for at in range(0, len(dense), at_once):
        part = Blocks(blocks.format, blocks.rows[at : at + at_once])
        if not _near(part, dense[at : at + at_once]):
            raise CheckpointError(f"a matrix of {dense.shape} cannot be quantised: weights too large, or no numbers")
    return blocks


@np.errstate(invalid="ignore", over="ignore")
def _near(blocks: Blocks, dense: Floats) -> bool:
    rows, inputs = dense.shape
    padding = ((0, 0), (0, -inputs % 32))
    weights, own = (np.pad(w, padding).reshape(rows, -1, 32) for w in (dense, decoded(blocks, inputs)))
    off = own - weights
    most = np.abs(weights).max(-1)
    if blocks.format == "q8_0":
        step, error, more = most / 127, np.abs(off).max(-1), 0 * most
    else:
        step, error = (weights.max(-1) - weights.min(-1)) / 15, np.sqrt(np.square(off).mean(-1))
        more = most * 2**-10
    return bool((error <= step * (0.5 + 2**-7) + more + _TINY).all())


def decoded(blocks: Blocks, inputs: int) -> Floats:
    """The weights float32 [outputs, inputs] of blocks of "q8_0" or "q4_1"."""
    rows = blocks.rows.reshape(len(blocks.rows), -1, FORMATS[blocks.format].bytes)
    if blocks.format == "q8_0":
        weights = rows[..., 2:].view(np.int8) * _halves(rows, 0)
    else:
        numbers = rows[..., 4:]
        weights = np.concatenate([numbers & 15, numbers >> 4], -1) * _halves(rows, 0) + _halves(rows, 2)
    made: Floats = weights.reshape(len(rows), -1)[:, :inputs]
    return made


def _halves(rows: NDArray[np.uint8], at: int) -> Floats:
    made: Floats = np.ascontiguousarray(rows[..., at : at + 2]).view("<f2").astype(np.float32)
    return made
