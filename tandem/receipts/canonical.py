"""Canonical JSON (RFC 8785): equal receipts have equal bytes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

MOST_INTEGER = 2**53  # larger integers differ between JSON readers: a seed is text


def canonical(value: Any) -> bytes:
    return _written(value).encode()


def _written(value: Any) -> str:
    if isinstance(value, Mapping):
        names = sorted(value, key=lambda name: name.encode("utf-16-be"))
        return "{" + ",".join(f"{_text(name)}:{_written(value[name])}" for name in names) + "}"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, Sequence):
        return "[" + ",".join(map(_written, value)) + "]"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return _number(value)


def _text(value: str) -> str:
    value.encode()  # raises UnicodeEncodeError, a ValueError, for a lone surrogate
    return json.dumps(value, ensure_ascii=False)


def _number(value: int | float) -> str:
    # ECMAScript writes the shortest digits that round-trip.
    if isinstance(value, int):
        if abs(value) > MOST_INTEGER:
            raise ValueError(f"{value} is beyond 2**53")
        return str(value)
    if not math.isfinite(value):
        raise ValueError(f"{value} is no number of JSON")
    if value == 0:
        return "0"
    sign, digits, point = _decimal(value)
    if point > 21 or point < -5:
        rest = f".{digits[1:]}" if len(digits) > 1 else ""
        return f"{sign}{digits[0]}{rest}e{point - 1:+d}"
    if point <= 0:
        return f"{sign}0.{'0' * -point}{digits}"
    if len(digits) <= point:
        return sign + digits.ljust(point, "0")
    return f"{sign}{digits[:point]}.{digits[point:]}"


def _decimal(value: float) -> tuple[str, str, int]:
    # 12.5 is "", "125", 2
    mantissa, _, exponent = repr(abs(value)).partition("e")
    whole, _, fraction = mantissa.partition(".")
    digits, point = (whole + fraction), len(whole) + int(exponent or 0)
    stripped = digits.lstrip("0")
    point -= len(digits) - len(stripped)
    return "-" if value < 0 else "", stripped.rstrip("0") or "0", point
