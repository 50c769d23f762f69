"""LoRA adapters of linear layers, added in fixed pairs, so bits depend neither on width, row nor threads."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tandem.checkpoints.adapter_files import Adapter, LowRank
from tandem.checkpoints.numbers import Floats

_PATH = re.compile(r"model\.layers\.\d+\.(self_attn|mlp)\.\w+_proj")
_TERMS = 2**21  # numbers that a product holds at once


class TorchAdapters:
    """A module's adapters, applied by hooks."""

    def __init__(self, module: Any, device: str) -> None:
        self._module, self._device = module, device
        self._parts: dict[int, dict[str, LowRank]] = {}
        self._hooked: set[str] = set()
        self._rows: Sequence[int] = ()

    def put(self, number: int, adapter: Adapter) -> None:
        for path, part in adapter.parts.items():
            self._check(adapter.name, path, part)
        self._parts[number] = {path: self._placed(part) for path, part in adapter.parts.items()}
        for path in adapter.parts.keys() - self._hooked:
            self._module.get_submodule(path).register_forward_hook(self._hook(path))
            self._hooked.add(path)

    @contextlib.contextmanager
    def of_rows(self, adapters: Sequence[int]) -> Iterator[None]:
        """Runs rows with these adapters (0: none) inside the `with` block."""
        self._rows = adapters if any(adapters) else ()
        try:
            yield
        finally:
            self._rows = ()

    def _check(self, name: str, path: str, part: LowRank) -> None:
        try:
            linear: Any = self._module.get_submodule(path)
        except AttributeError:
            linear = None
        if linear is None or not _PATH.fullmatch(path) or not hasattr(linear, "in_features"):
            raise ValueError(f"adapters: {name}: the model has no linear layer {path} that takes an adapter")
        own, given = (linear.out_features, linear.in_features), (part.up.shape[0], part.down.shape[1])
        if own != given:
            raise ValueError(f"adapters: {name}: {path} is {own} in the model, the adapter's {given}")

    def _placed(self, part: LowRank) -> LowRank:
        return LowRank(_padded(part.down).to(self._device), _padded(part.up).to(self._device), part.scale)

    def _hook(self, path: str) -> Any:
        def extend(module: Any, args: tuple[Any, ...], out: Tensor) -> None:
            for row, number in enumerate(self._rows):
                part = self._parts[number].get(path) if number else None
                if part is not None:
                    shrunk = products(args[0][row].float(), part.down)
                    out[row] = (out[row].float() + products(shrunk, part.up) * part.scale).to(out.dtype)

        return extend


def _padded(matrix: Floats) -> Tensor:
    columns = matrix.shape[1]
    return functional.pad(torch.from_numpy(matrix), (0, (1 << (columns - 1).bit_length()) - columns))


def products(x: Tensor, matrix: Tensor) -> Tensor:
    """Products of x [n, inputs] with rows of `matrix`, zero-padded to a power of two columns: float32 [n, outputs]."""
    width = matrix.shape[1]
    x = functional.pad(x, (0, width - x.shape[1]))[:, None]
    return torch.cat([_halved(x * part) for part in matrix.split(max(1, _TERMS // (len(x) * width)))], -1)


def _halved(terms: Tensor) -> Tensor:
    # first half plus second half, until one is left
    while (count := terms.shape[-1]) > 1:
        terms = terms[..., : count // 2] + terms[..., count // 2 :]
    return terms[..., 0]
