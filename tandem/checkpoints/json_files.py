"""Reads untrusted JSON within bounds of size, depth and range."""

from __future__ import annotations

import functools
import json
import math
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MOST_BYTES = 1 << 22  # Python's objects take up to 25 times as much memory
_MOST_DEPTH = 64
_TOO_DEEP = f"nested more than {_MOST_DEPTH} deep"
_MOST_DIGITS = 300  # so that every whole number is within the range of a float


def read_object(file: Path, most_bytes: int = MOST_BYTES) -> dict[str, Any]:
    """Raises OSError, or ValueError without the file's name."""
    found = read_json(file, most_bytes)
    if not isinstance(found, dict):
        raise ValueError("not an object")
    return found


def read_json(file: Path, most_bytes: int = MOST_BYTES) -> Any:
    if not stat.S_ISREG(file.stat().st_mode):  # a pipe could be waited for without end
        raise ValueError("not a regular file")
    with file.open("rb") as opened:
        content = opened.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"longer than {most_bytes} bytes")
    return parsed(content.decode())


def parsed(text: str) -> Any:
    try:
        found = json.loads(text, parse_int=_whole, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    _check_depth(found)
    return found


def _whole(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"a number has {len(digits)} digits")
    return int(digits)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a name stands twice in one object")
    for name, value in pairs:
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name[:60]!r} is {value}, not a finite number")
    return made


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(_MOST_DEPTH + 1):
        level = [
            inner
            for each in level
            if isinstance(each, list | dict)
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
    if level:
        raise ValueError(_TOO_DEEP)


def count(name: str, value: Any) -> int:
    if type(value) is not int or not 0 < value < 2**31:
        raise ValueError(f"{name}: {value!r:.60} is not a whole number above 0")
    return value


def number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name}: {value!r:.60} is not a number")
    return float(value)


def an_object(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}: {value!r:.60} is not an object")
    return value


@functools.cache
def data_of(module: str) -> dict[str, Any]:
    """Returns the table beside a module of this name: NAME.json."""
    made: dict[str, Any] = json.loads(Path(__file__).with_name(f"{module}.json").read_text(encoding="utf-8"))
    return made
