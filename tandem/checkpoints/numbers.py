"""Converts number formats in numpy, which lacks bfloat16 and FP8."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
STORAGE = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "F8_E4M3": "u1",
    "F8_E5M2": "u1",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
    "U8": "u1",
    "BOOL": "?",
}  # numpy types by safetensors' dtypes
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}  # by safetensors' names
_FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
_ROWS = 1 << 22  # numbers that are converted at a time, so that intermediates stay small


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """A tensor: safetensors' dtype, and numbers of STORAGE's type."""

    dtype: str
    values: NDArray[Any]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def is_float(self) -> bool:
        return self.dtype in _FLOATS

    def floats(self) -> Floats:
        if self.dtype == "BF16":
            return from_bfloat16(self.values)
        if self.dtype.startswith("F8"):
            made: Floats = _bytes_as_floats(self.dtype)[self.values]
            return made
        with np.errstate(over="ignore"):
            return np.asarray(self.values, dtype=np.float32)

    def to(self, dtype: str) -> Stored:
        wanted = DTYPES[dtype]
        if self.dtype == wanted:
            return Stored(wanted, np.ascontiguousarray(self.values))
        floats = self.floats()
        if wanted == "BF16":
            return Stored(wanted, to_bfloat16(floats))
        with np.errstate(over="ignore"):
            return Stored(wanted, np.ascontiguousarray(floats, dtype=STORAGE[wanted]))

    def own(self) -> Stored:
        # A mapped file could be truncated while in use.
        whole = self.values
        while isinstance(whole.base, np.ndarray):  # of a view
            whole = whole.base
        is_own = whole.base is None and whole.flags.writeable
        return self if is_own else Stored(self.dtype, self.values.copy())


def of_floats(values: Floats) -> Stored:
    return Stored("F32", values)


def from_bfloat16(bits: NDArray[np.uint16]) -> Floats:
    made = np.empty(bits.shape, dtype="<u4")
    np.left_shift(bits, 16, out=made, dtype=np.uint32, casting="unsafe")
    return made.view(np.float32)


def to_bfloat16(values: Floats) -> NDArray[np.uint16]:
    # Ties to even; NaN becomes 0x7fc0.
    flat = np.ascontiguousarray(values, dtype=np.float32).reshape(-1)
    made = np.empty(flat.shape, dtype="<u2")
    for at in range(0, len(flat), _ROWS):
        part = flat[at : at + _ROWS]
        bits = part.view(np.uint32)
        rounded = (bits + (0x7FFF + ((bits >> 16) & 1)).astype(np.uint32)) >> 16
        made[at : at + _ROWS] = np.where(np.isnan(part), 0x7FC0, rounded)
    return made.reshape(values.shape)


@functools.cache
def _bytes_as_floats(dtype: str) -> Floats:
    # float32 [256]; E4M3 has no infinity, E5M2 has.
    byte = np.arange(256)
    exponent_bits, mantissa_bits = (4, 3) if dtype == "F8_E4M3" else (5, 2)
    bias, most = 2 ** (exponent_bits - 1) - 1, 2**exponent_bits - 1
    exponent, mantissa = (byte >> mantissa_bits) & most, byte & (2**mantissa_bits - 1)
    fraction = mantissa / 2**mantissa_bits
    size = np.where(exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - 1.0 * bias))
    if dtype == "F8_E4M3":
        size = np.where((byte & 0x7F) == 0x7F, np.nan, size)
    else:
        size = np.where(exponent == most, np.where(mantissa == 0, np.inf, np.nan), size)
    return np.where(byte & 0x80, -size, size).astype(np.float32)
