"""Says in which format each matrix of a model lies and is packed: dense, quantised when it is loaded, or as stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from tandem.checkpoints.gguf_blocks import FORMATS, Blocks
from tandem.checkpoints.locate import CheckpointError
from tandem.runners.native.library import Matrix

if TYPE_CHECKING:
    from torch import Tensor

DENSE = 0
_TINY = 2.0**-18  # scales in float16 are whole multiples of 2**-24
INT8 = FORMATS["q8_0"].kind
Q4 = FORMATS["q4_1"].kind


class BlockSource(Protocol):
    """Where matrices lie in blocks: a GGUF file, or the cache of what was quantised before."""

    def formats(self) -> tuple[str, ...]:
        """Names of their formats, sorted."""

    def matrix(self, layer: int, name: str) -> Blocks | None:
        """The matrix q, k, v, o, gate, up or down of a layer; None if it is dense. Raises CheckpointError."""

    def head(self) -> Blocks | None:
        """Like `matrix`: the output matrix."""


@dataclass(frozen=True, slots=True)
class Packing:
    """How the matrices of a model are packed.

    `layers` and `head`: GGML's numbers of the formats that dense weights are packed in, 0 for dense; `name`: what
    that is called. `stored`: where blocks come from, which are packed as they are.
    """

    name: str = ""
    layers: int = DENSE
    head: int = DENSE
    stored: BlockSource | None = None

    def describe(self, dtype: str) -> str:
        """Names the weights' format, and after a slash the dtype of all else, such as "int8/float32"."""
        return f"{'+'.join(self._names())}/{dtype}" if self.quantises else dtype

    @property
    def quantises(self) -> bool:
        """Whether any matrix is packed in blocks."""
        return bool(self._names())

    def _names(self) -> tuple[str, ...]:
        return (self.name,) if self.name else self.stored.formats() if self.stored else ()

    def matrix(self, layer: int, name: str, linear: Any) -> tuple[Matrix, object]:
        """What the library packs for a linear layer, and what keeps its memory. Raises CheckpointError."""
        blocks = self.stored.matrix(layer, name) if self.stored else None
        return _matrix(linear.weight, linear.bias, self.layers, blocks)

    def output(self, head: Any, wanted: Sequence[int] | None) -> tuple[Matrix, object]:
        """Like `matrix`, for the rows `only` (None: all) of the output matrix."""
        import torch

        blocks = self.stored.head() if self.stored else None
        weight, bias = head.weight.detach(), head.bias
        if wanted is not None:
            which = torch.as_tensor(wanted).long()
            weight = weight.new_empty(len(wanted), weight.shape[1]) if weight.is_meta else weight[which].contiguous()
            bias = None if bias is None else bias[which].contiguous()
            blocks = blocks and Blocks(blocks.format, np.ascontiguousarray(blocks.rows[which.numpy()]))
        return _matrix(weight, bias, self.head, blocks)


UNQUANTISED = Packing()


def packing(weights: str, stored: BlockSource | None = None) -> Packing:
    """How `--weights` packs a model. `stored`: its blocks: of its GGUF file, or those quantised before."""
    if weights == "int8":
        return Packing(weights, INT8, INT8, stored)
    if weights == "q4":  # the head decides between neighbours: 4 bits are too few
        return Packing(weights, Q4, INT8, stored)
    return UNQUANTISED if stored is None else Packing(stored=stored)


def _matrix(weight: Tensor, bias: Tensor | None, packed: int, blocks: Blocks | None) -> tuple[Matrix, object]:
    kept = weight, bias, blocks
    address = None if bias is None else bias.data_ptr()
    if blocks is None:
        return Matrix(weight.data_ptr(), address, DENSE, packed), kept
    form = FORMATS[blocks.format]
    if blocks.rows.shape != (weight.shape[0], -(-weight.shape[1] // form.inputs) * form.bytes):
        raise CheckpointError(
            f"a matrix of {tuple(weight.shape)} is stored as {blocks.rows.shape} bytes of {blocks.format}"
        )
    return Matrix(blocks.rows.ctypes.data, address, form.kind, form.kind), kept


def encoded(library: Any, weight: Tensor, form: str) -> Blocks:
    """A matrix [outputs, inputs] in blocks of "q8_0" or "q4_1"."""
    import torch

    dense, size = weight.detach().to(torch.float32).contiguous(), FORMATS[form]
    outputs, inputs = dense.shape
    rows = np.empty((outputs, -(-inputs // size.inputs) * size.bytes), dtype=np.uint8)
    library.tandem_encode(size.kind, outputs, inputs, dense.data_ptr(), rows.ctypes.data)
    return near(Blocks(form, rows), dense)


def near(blocks: Blocks, dense: Tensor) -> Blocks:
    """The blocks, if they are as near to the weights float32 [outputs, inputs] as arithmetic promises.

    In Q8_0 every weight is within half a step. A block of Q4_1 loses no more squares than one whose range is kept
    whole, which is within half a step and what rounding its minimum costs. Raises CheckpointError.
    """
    import torch

    groups = [torch.nn.functional.pad(w, (0, -dense.shape[1] % 32)) for w in (dense, decoded(blocks, dense.shape[1]))]
    weights, off = groups[0].unflatten(1, (-1, 32)), (groups[1] - groups[0]).unflatten(1, (-1, 32))
    most = weights.abs().amax(-1)
    if blocks.format == "q8_0":
        step, error, more = most / 127, off.abs().amax(-1), 0 * most
    else:
        step, error = (weights.amax(-1) - weights.amin(-1)) / 15, off.square().mean(-1).sqrt()
        more = 2**-10 * most
    if not bool((error <= step * (0.5 + 2**-7) + more + _TINY).all()):
        raise CheckpointError(f"a matrix of {tuple(dense.shape)} cannot be quantised: weights too large, or no numbers")
    return blocks


def decoded(blocks: Blocks, inputs: int) -> Tensor:
    """The weights float32 [outputs, inputs] of blocks of "q8_0" or "q4_1"."""
    import torch

    rows = torch.from_numpy(blocks.rows).view(len(blocks.rows), -1, FORMATS[blocks.format].bytes)
    if blocks.format == "q8_0":
        weights = rows[..., 2:].view(torch.int8) * _halves(rows, 0)
    else:
        numbers = rows[..., 4:]
        weights = torch.cat([numbers & 15, numbers >> 4], -1) * _halves(rows, 0) + _halves(rows, 2)
    return weights.flatten(1)[:, :inputs]


def _halves(rows: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of each block, as float32 [outputs, blocks, 1]."""
    import torch

    return rows[..., at : at + 2].contiguous().view(torch.float16).to(torch.float32)
