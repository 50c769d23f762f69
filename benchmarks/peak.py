"""The peak of the processor's products of bytes, which the share that steps reach is told of."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from tandem.runners.native.build import find_compiler
from tandem.runners.native.library import ModelShape


@dataclass(frozen=True)
class Peak:
    """What makes the products, and how many a second one thread made at most; 0 where the instruction is not known."""

    instruction: str = ""
    rate: float = 0.0

    def share(self, rate: float) -> float | None:
        return rate / self.rate if self.rate else None

    def __str__(self) -> str:
        return f"{self.rate / 1e9:.0f} G a second by {self.instruction}" if self.rate else "not measured"


class Meter:
    """Measures the peak on the calling thread, in processor time; the greatest of all measurements counts."""

    def __init__(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / "peak.so"
            source = Path(__file__).with_name("peak.cpp")
            flags = ["-std=c++20", "-O2", "-march=native", "-fPIC", "-shared"]
            subprocess.run([find_compiler(), *flags, str(source), "-o", str(made)], check=True)
            library = ctypes.CDLL(str(made))
        library.instruction.restype = ctypes.c_char_p
        library.peak.restype = ctypes.c_double
        self._library = library
        self.best = Peak(library.instruction().decode())

    def measure(self, times: int = 1) -> Peak:
        for _ in range(times):
            self.best = replace(self.best, rate=max(self.best.rate, float(self._library.peak())))
        return self.best


def multiply_adds(sizes: ModelShape, tokens: int, wanted: int) -> int:
    """Products of weights in a step of `tokens`, of which `wanted` get logits; attention is not among them."""
    heads = (2 * sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim
    layer = int(sizes.hidden) * int(heads + 3 * sizes.intermediate)
    return tokens * int(sizes.layers) * layer + wanted * int(sizes.hidden) * int(sizes.outputs)
