"""Makes a module compute what its packed matrices do, in torch: what the steps are checked against at every start."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tandem.checkpoints.gguf_blocks import FORMATS, Blocks
from tandem.runners.native.library import MATRICES
from tandem.runners.native.weights import DENSE, Packing, decoded, encoded

GROUP = 32
_MADE_HERE = ("q8_0", "q4_1")


@contextlib.contextmanager
def as_packed(module: Any, packing: Packing, library: Any) -> Iterator[None]:
    """Meanwhile, linear layers that are packed in blocks have those blocks' weights, and inputs in 8 bits.

    One matrix at a time is dequantised.
    """
    with as_products(_linears(module, packing), library):
        yield


@contextlib.contextmanager
def as_products(linears: Iterable[tuple[Any, Blocks | None, int]], library: Any) -> Iterator[None]:
    """Like `as_packed`, for linear layers, the blocks that each is packed from, and the format it is quantised to."""
    changed = []
    try:
        for linear, blocks, form in linears:
            if blocks is not None or form != DENSE:
                linear.forward = _Product(linear, blocks, form, library)
                changed.append(linear)
        yield
    finally:
        for linear in changed:
            del linear.forward


def _linears(module: Any, packing: Packing) -> Iterator[tuple[Any, Blocks | None, int]]:
    """Every linear layer, the blocks that it is packed from if there are any, and the format that we quantise it to.

    The latter is 0 for what a file has in blocks: there the module's own weights count, which others unpacked.
    """
    stored = packing.stored
    for index, layer in enumerate(module.base_model.layers):
        for name in MATRICES:
            part = layer.self_attn if name in "qkvo" else layer.mlp
            blocks = None if stored is None else stored.matrix(index, name)
            yield getattr(part, f"{name}_proj"), blocks, packing.layers
    yield module.get_output_embeddings(), None if stored is None else stored.head(), packing.head


PARTS = (("q", "k", "v"), ("o",), ("gate", "up"), ("down",))
"""Matrices that are packed together, in the order of MATRICES."""
_LANES = 16


def products(
    module: Any, packing: Packing, library: Any, wanted: Sequence[int] | None
) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """Yields (layer, part, inputs, outputs) for each packed matrix; layer -1 is the head.

    Inputs are [2, inputs] in the module's dtype, outputs float32 [2, outputs] in the order of NativeModel.product.
    """
    made = [
        linear if blocks is None and form == DENSE else _Product(linear, blocks, form, library)
        for linear, blocks, form in _linears(module, packing)
    ]
    widths = [linear.in_features for linear, _, _ in _linears(module, packing)]
    chance, dtype = torch.Generator().manual_seed(0), next(module.parameters()).dtype
    for layer in range(len(made) // len(MATRICES)):
        for part, names in enumerate(PARTS):
            at = layer * len(MATRICES) + MATRICES.index(names[0])
            x = torch.randn(2, widths[at], generator=chance).to(dtype)
            own = [product(x).float() for product in made[at : at + len(names)]]
            yield layer, part, x, _interleaved(own) if "gate" in names else torch.cat(own, 1)
    x = torch.randn(2, widths[-1], generator=chance).to(dtype)
    own = [made[-1](x).float()]
    yield -1, 0, x, own[0] if wanted is None else own[0][:, torch.as_tensor(wanted).long()]


def _interleaved(outputs: Sequence[Tensor]) -> Tensor:
    """16 outputs of the gate beside the same 16 of up, filled up with zeros."""
    parts = [functional.pad(each, (0, -each.shape[1] % _LANES)).unflatten(1, (-1, _LANES)) for each in outputs]
    return torch.stack(parts, 2).flatten(1)


class _Product:
    """A linear layer over weights in blocks and activations in groups of 32 numbers, each with its scale."""

    def __init__(self, linear: Any, blocks: Blocks | None, form: int, library: Any) -> None:
        self._linear, self._blocks, self._form, self._library = linear, blocks, form, library

    def __call__(self, x: Tensor) -> Tensor:
        """[.., outputs] of x [.., inputs], in its dtype; sums are in float32."""
        bias = self._linear.bias
        made = functional.linear(rounded(x.float()), self._weight(x.shape[-1]), None if bias is None else bias.float())
        return made.to(x.dtype)

    def _weight(self, inputs: int) -> Tensor:
        """Weights float32 [outputs, inputs]."""
        if self._form == DENSE:
            return self._linear.weight.float()
        form = next(name for name in _MADE_HERE if FORMATS[name].kind == self._form)
        return decoded(self._blocks or encoded(self._library, self._linear.weight, form), inputs)


def rounded(x: Tensor) -> Tensor:
    """Activations float32 [.., inputs] to 8 bits and back, as activations.h rounds them."""
    inputs = x.shape[-1]
    groups = functional.pad(x, (0, -inputs % GROUP)).unflatten(-1, (-1, GROUP))
    most = groups.abs().amax(-1, keepdim=True)
    numbers = (groups * torch.where(most > 0, 127 / most, 0.0)).round()
    return (numbers * (most / 127)).flatten(-2)[..., :inputs]
