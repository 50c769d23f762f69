"""Converts dataclasses to JSON and back by their type hints."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar, Union

T = TypeVar("T")
HIDDEN = {"json": None}  # field metadata: not written


def encoded(value: Any) -> Any:
    """Converts dataclasses, enums, paths, mappings and sequences; infinities and NaN become None."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else f"{key:g}": encoded(one) for key, one in value.items()}
    if not dataclasses.is_dataclass(value):
        return [encoded(one) for one in value]
    shown = (field.name for field in dataclasses.fields(value) if field.metadata != HIDDEN)
    return {name: encoded(getattr(value, name)) for name in shown}


def decoded(kind: type[T], value: Any) -> T:
    """Converts `value` to `kind`. Raises ValueError or TypeError, also for unknown keys."""
    return typing.cast(T, _decoded(kind, value))


_hints = functools.cache(typing.get_type_hints)  # slow: it compiles every annotation


def _decoded(kind: Any, value: Any) -> Any:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in inner:
            return None
        (kind,) = (one for one in inner if one is not type(None))
        return _decoded(kind, value)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        hints = _hints(kind)
        if not isinstance(value, Mapping) or (unknown := set(value) - set(hints)):
            raise ValueError(f"{kind.__name__}: {f'unknown {min(unknown)}' if isinstance(value, Mapping) else value!r}")
        return kind(**{key: _decoded(hints[key], one) for key, one in value.items()})
    if origin is tuple:
        kinds = inner[:1] * len(value) if inner[1:] == (...,) else inner
        return tuple(_decoded(each, one) for each, one in zip(kinds, value, strict=True))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {_decoded(inner[0], key): _decoded(inner[1], one) for key, one in value.items()}
    if isinstance(kind, type) and issubclass(kind, Enum | Path | int | float) and kind is not bool:
        return kind(value)  # JSON keys are strings, and 0.0 may be written as 0
    return value


def read_text(path: Path, flag: str) -> str:
    """Reads the file of a flag. Raises a one-line ValueError."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(f"{flag}: {path} does not exist") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{flag}: {path} cannot be read: {' '.join(str(error).split())}") from None
