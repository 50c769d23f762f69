"""Parses flag values: lists separated by commas, and `auto|K`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Number = TypeVar("Number", int, float)


def split_list(text: str | None) -> tuple[str, ...]:
    """The non-empty parts of a list such as `a, b`."""
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


def numbers(flag: str, text: str | None, kind: Callable[[str], Number]) -> tuple[Number, ...]:
    """The numbers of a list such as `1,2,4`; `kind` is int or float. Raises ValueError."""
    try:
        return tuple(kind(part) for part in split_list(text))
    except ValueError:
        raise ValueError(f"{flag}: {text!r} is not a list of numbers, as in 1,4") from None


def auto_or_count(flag: str, text: str | None) -> int | None:
    """The number K of `auto|K`; None for `auto` or no text. Raises ValueError."""
    if text is None or text == "auto":
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{flag}: {text!r} is neither a number nor auto") from None
