"""Measures the processor's peak rate of byte products."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

from tandem.runners.native.compilation import find_compiler
from tandem.runners.native.library import ModelShape

FEWEST_BY_TILES = 9  # tokens from which AMX tiles are used: AVX-512 VNNI takes two passes for them


@dataclass(frozen=True)
class Peak:
    """An instruction's peak on one thread."""

    instruction: str = ""
    rate: float = 0.0  # products per second; 0: unknown instruction

    def share(self, rate: float) -> float | None:
        return rate / self.rate if self.rate else None

    def __str__(self) -> str:
        return f"{self.rate / 1e9:.0f} G a second by {self.instruction}"


@dataclass(frozen=True)
class Peaks:
    """Peaks on registers and on AMX tiles (quantised.h)."""

    registers: Peak = field(default_factory=Peak)
    tiles: Peak = field(default_factory=Peak)

    def of(self, tokens: int, by_tiles: bool = True) -> Peak:
        """Returns the peak for a product of `tokens`."""
        return self.tiles if by_tiles and self.tiles.rate and tokens >= FEWEST_BY_TILES else self.registers

    def __str__(self) -> str:
        return "; ".join(str(peak) for peak in (self.registers, self.tiles) if peak.rate) or "not measured"


class Meter:
    """Measures peaks in the calling thread's processor time, keeping the greatest; of tiles with `by_tiles`."""

    def __init__(self, by_tiles: bool) -> None:
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / "peak.so"
            source = Path(__file__).with_name("peak.cpp")
            flags = ["-std=c++20", "-O2", "-march=native", "-fPIC", "-shared"]
            subprocess.run([find_compiler(), *flags, str(source), "-o", str(made)], check=True)
            library = ctypes.CDLL(str(made))
        library.instruction.restype = ctypes.c_char_p
        library.peak.restype = library.peak_of_tiles.restype = ctypes.c_double
        self._library, self._by_tiles = library, by_tiles
        self.best = Peaks(Peak(library.instruction().decode()), Peak("tdpbsud") if by_tiles else Peak())

    def measure(self, times: int = 1) -> Peaks:
        for _ in range(times):
            registers, tiles = self.best.registers, self.best.tiles
            registers = replace(registers, rate=max(registers.rate, float(self._library.peak())))
            if self._by_tiles:
                tiles = replace(tiles, rate=max(tiles.rate, float(self._library.peak_of_tiles())))
            self.best = Peaks(registers, tiles)
        return self.best


def multiply_adds(sizes: ModelShape, tokens: int, wanted: int) -> int:
    """Counts a step's products of weights, without attention; `wanted` of its tokens get logits."""
    heads = (2 * sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim
    layer = int(sizes.hidden) * int(heads + 3 * sizes.intermediate)
    return tokens * int(sizes.layers) * layer + wanted * int(sizes.hidden) * int(sizes.outputs)
