"""Repacks GGUF formats for native steps, exactly: Q5_0 and IQ4_NL fit in Q8_0, Q3_K in Q6_K."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_Q5_0, _Q3_K, _IQ4_NL = 6, 11, 20  # GGML's numbers
_ONE = np.frombuffer(np.float16(1).tobytes(), np.uint8)
_AT_ONCE = 1 << 22  # numbers that are repacked at a time


@dataclass(frozen=True, slots=True)
class Repacked:
    """A format, its block's inputs and bytes, and the format that holds it."""

    name: str
    inputs: int
    bytes: int
    into: str


REPACKED = {
    _Q5_0: Repacked("q5_0", 32, 22, "q8_0"),
    _Q3_K: Repacked("q3_k", 256, 110, "q6_k"),
    _IQ4_NL: Repacked("iq4_nl", 32, 18, "q8_0"),
}


def repacked(rows: NDArray[np.uint8], kind: int) -> NDArray[np.uint8]:
    """Repacks rows, uint8 [outputs, row bytes]."""
    form = REPACKED[kind]
    step = max(1, _AT_ONCE // (rows.shape[1] // form.bytes * form.inputs))
    make = _q6_k if kind == _Q3_K else _q8_0
    made = [make(rows[at : at + step].reshape(-1, form.bytes), kind) for at in range(0, len(rows), step)]
    return np.concatenate(made).reshape(len(rows), -1)


def _q8_0(blocks: NDArray[np.uint8], kind: int) -> NDArray[np.uint8]:
    plain = blocks.copy()
    plain[:, :2] = _ONE
    return np.concatenate([blocks[:, :2], _integers(plain, kind).view(np.uint8)], 1)


def _q6_k(blocks: NDArray[np.uint8], kind: int) -> NDArray[np.uint8]:
    # Q3_K: high bits [32], low bits [64], scales [12], scale of scales [2].
    plain, scales = blocks.copy(), blocks.copy()
    plain[:, 96:104], plain[:, 104:108], plain[:, 108:] = 0x11, 0xAA, _ONE  # all scales are 1
    scales[:, :32], scales[:, 32:96], scales[:, 108:] = 0xFF, 0x55, _ONE  # all numbers are 1
    numbers = (_integers(plain, kind) + 32).view(np.uint8)
    low, high = (numbers & 15).reshape(-1, 2, 2, 64), (numbers >> 4).reshape(-1, 2, 4, 32)
    lows = low[:, :, 0] | low[:, :, 1] << 4
    highs = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    parts = [lows.reshape(-1, 128), highs.reshape(-1, 64), _integers(scales, kind)[:, ::16].view(np.uint8)]
    return np.concatenate([*parts, blocks[:, 108:]], 1)


def _integers(blocks: NDArray[np.uint8], kind: int) -> NDArray[np.int8]:
    import gguf

    made: NDArray[np.int8] = gguf.dequantize(blocks, gguf.GGMLQuantizationType(kind)).astype(np.int8)
    return made
