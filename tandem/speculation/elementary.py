"""exp, log and sum of float64 as fixed sequences of IEEE operations: the same bits on every CPU.

The formulas of fdlibm (Sun Microsystems, 1993), errors below 1 ulp; tandem/runners/native/elementary.h is the same in
C++.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

LANES = 64
_BLOCK = 2048  # numbers whose intermediate results stay in the cache
_MAGIC = 1.5 * 2.0**52  # a number below 2^51 added to it is rounded to an integer, which its lowest bits then hold
_LOG2_E = float.fromhex("0x1.71547652b82fep+0")
_LN2_HIGH = float.fromhex("0x1.62e42feep-1")  # its lowest bits are 0: times an exponent it is exact
_LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")
_P1, _P2, _P3, _P4, _P5 = (
    float.fromhex(digits)
    for digits in (
        "0x1.555555555553ep-3",
        "-0x1.6c16c16bebd93p-9",
        "0x1.1566aaf25de2cp-14",
        "-0x1.bbd41c5d26bf1p-20",
        "0x1.6376972bea4d0p-25",
    )
)
_L1, _L2, _L3, _L4, _L5, _L6, _L7 = (
    float.fromhex(digits)
    for digits in (
        "0x1.5555555555593p-1",
        "0x1.999999997fa04p-2",
        "0x1.2492494229359p-2",
        "0x1.c71c51d8e78afp-3",
        "0x1.7466496cb03dep-3",
        "0x1.39a09d078c69fp-3",
        "0x1.2f112df3e5244p-3",
    )
)
_ONE, _ROOT_HALF, _FRACTION = (np.int64(bits) for bits in (0x3FF << 52, 0x3FE6A09E << 32, 2**52 - 1))


def exp(x: ArrayLike) -> Floats:
    """Returns e^x in x's shape, without NaN: 0 below -708, e^709 above 709."""
    return _by_blocks(_exp, x)


def log(x: ArrayLike) -> Floats:
    """Returns the natural logarithm of finite x >= 0 in x's shape; log(2^-1022) below."""
    return _by_blocks(_log, x)


def total(values: Floats) -> float:
    """Returns the sum: value i goes to lane i % LANES, then lanes are added in order."""
    rows = np.zeros((-(-len(values) // LANES), LANES))
    rows.reshape(-1)[: len(values)] = values
    return float(np.add.accumulate(rows.sum(axis=0))[-1])  # numpy adds whole rows in order, and none pairwise


def _by_blocks(function: Callable[[Floats], Floats], x: ArrayLike) -> Floats:
    given = np.asarray(x, dtype=np.float64)
    flat, made = given.reshape(-1), np.empty(given.size)
    for i in range(0, len(flat), _BLOCK):
        made[i : i + _BLOCK] = function(flat[i : i + _BLOCK])
    return made.reshape(given.shape)


def _exp(x: Floats) -> Floats:
    # x = k ln 2 + r with |r| <= ln 2 / 2; e^x = 2^k e^r
    held = np.minimum(np.maximum(x, -709.0), 709.0)
    shifted = held * _LOG2_E + _MAGIC
    k = shifted - _MAGIC
    high, low = held - k * _LN2_HIGH, k * _LN2_LOW
    r = high - low
    z = r * r
    c = r - z * (_P1 + z * (_P2 + z * (_P3 + z * (_P4 + z * _P5))))
    power = 1.0 - ((low - r * c / (2.0 - c)) - high)
    scaled = power.view(np.int64) + (shifted.view(np.int64) << 52)
    return np.where(x < -708.0, 0.0, scaled.view(np.float64))


def _log(x: Floats) -> Floats:
    # x = 2^k (1 + f), 1 + f between the roots of 1/2 and 2; log(1 + f) is a series in s = f / (2 + f)
    bits = np.maximum(x, 2.0**-1022).view(np.int64) + (_ONE - _ROOT_HALF)
    k = ((bits >> 52) - 1023).astype(np.float64)
    f = ((bits & _FRACTION) + _ROOT_HALF).view(np.float64) - 1.0
    s = f / (2.0 + f)
    z = s * s
    w = z * z
    odd = z * (_L1 + w * (_L3 + w * (_L5 + w * _L7)))
    even = w * (_L2 + w * (_L4 + w * _L6))
    half = 0.5 * f * f
    return k * _LN2_HIGH - ((half - (s * (half + (even + odd)) + k * _LN2_LOW)) - f)
