"""Rotary tables by transformers' formulas in float32, with the same bits on every machine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from tandem.checkpoints.numbers import Floats, of_floats

ONE = np.float32(1)
TYPES = ("default", "linear", "llama3", "yarn", "longrope", "dynamic")
# types whose frequencies depend on a step's longest sequence in transformers, here on the configured length
BY_LENGTH = ("longrope", "dynamic")


def rotary_tables(
    rope: Mapping[str, Any], head_dim: int, length: int, dtype: str, configured: int = 0
) -> tuple[Floats, Floats]:
    """Cosines and sines, float32 [length, values that turn / 2], in the numbers of `dtype`. Raises ValueError."""
    try:
        turned = int(head_dim * rope.get("partial_rotary_factor", 1.0))
        frequencies, scale = _frequencies(rope, turned, configured)
        if (factors := rope.get("freq_factors")) is not None:  # a GGUF's, as of Llama 3.1
            frequencies = np.divide(frequencies, np.asarray(factors, dtype=np.float32))
    except (KeyError, TypeError, ArithmeticError, ValueError) as error:
        raise ValueError(f"rope_parameters: {type(error).__name__}: {error}") from None
    angles = (np.arange(length, dtype=np.float32)[:, None] * frequencies[None]).astype(np.float64)
    cosines, sines = (
        of_floats(turn(angles).astype(np.float32) * np.float32(scale)).to(dtype).floats() for turn in (np.cos, np.sin)
    )
    return np.ascontiguousarray(cosines), np.ascontiguousarray(sines)


def _frequencies(rope: Mapping[str, Any], dim: int, configured: int) -> tuple[Floats, float]:
    """Angles per position, float32 [dim / 2], and the factor of cosines and sines."""
    kind = rope.get("rope_type", "default")
    base = float(rope["rope_theta"])
    if kind == "dynamic":
        seen, factor = float(rope["max_position_embeddings"]), float(rope["factor"])
        base *= (factor * max(configured, seen) / seen - (factor - 1)) ** (dim / (dim - 2))
    periods = _periods(base, dim)
    if kind == "longrope":
        return _longrope(rope, periods, configured)
    if kind == "yarn":
        return _yarn(rope, periods, dim)
    plain = ONE / periods
    if kind == "linear":
        return plain / np.float32(rope["factor"]), 1.0
    if kind == "llama3":
        return _llama3(rope, plain), 1.0
    return plain, 1.0


def _periods(base: float, dim: int) -> Floats:
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    made: Floats = (np.float64(base) ** exponents.astype(np.float64)).astype(np.float32)
    return made


def _llama3(rope: Mapping[str, Any], plain: Floats) -> Floats:
    factor, low, high = (np.float32(rope[name]) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    seen = float(rope["original_max_position_embeddings"])
    longest, shortest = np.float32(seen / float(low)), np.float32(seen / float(high))
    waves = np.float32(2 * math.pi) / plain
    slowed = np.where(waves > longest, plain / factor, plain)
    smooth = (np.float32(seen) / waves - low) / np.float32(float(high) - float(low))
    between = (ONE - smooth) * slowed / factor + smooth * slowed
    made: Floats = np.where(~(waves < shortest) & ~(waves > longest), between, slowed)
    return made


def _yarn(rope: Mapping[str, Any], periods: Floats, dim: int) -> tuple[Floats, float]:
    base, seen = float(rope["rope_theta"]), float(rope["original_max_position_embeddings"])
    factor = rope.get("factor")
    factor = float(rope["max_position_embeddings"]) / seen if factor is None else float(factor)

    def boundary(turns: float) -> float:
        return dim * math.log(seen / (turns * 2 * math.pi)) / (2 * math.log(base))

    first, last = boundary(rope.get("beta_fast") or 32), boundary(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    width = last - first if first != last else 0.001
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - np.float32(first)) / np.float32(width), 0, 1)
    kept = ONE - ramp
    made: Floats = ONE / (np.float32(factor) * periods) * (ONE - kept) + ONE / periods * kept
    return made, _yarn_scale(rope, factor)


def _longrope(rope: Mapping[str, Any], periods: Floats, configured: int) -> tuple[Floats, float]:
    seen, scale = float(rope["original_max_position_embeddings"]), rope.get("attention_factor")
    factors = np.asarray(rope["long_factor" if configured > seen else "short_factor"], dtype=np.float32)
    if scale is None:
        factor = rope.get("factor") or float(rope["max_position_embeddings"]) / seen
        scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(seen))
    made: Floats = ONE / (factors * periods)
    return made, float(scale)


def _yarn_scale(rope: Mapping[str, Any], factor: float) -> float:
    if (given := rope.get("attention_factor")) is not None:
        return float(given)

    def scale(more: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * more * math.log(factor) + 1.0

    own, whole = rope.get("mscale"), rope.get("mscale_all_dim")
    return scale(own) / scale(whole) if own and whole else scale(1)
