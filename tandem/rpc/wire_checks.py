"""Checks values in servers' messages. Logged InvalidFields name fields and counts, never token ids."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

from tandem.speculation.types import InvalidField

Member = TypeVar("Member")
MOST_TOKENS = 2**26  # of a vocabulary or sequence
MOST_NAME = 256  # characters
MOST_ROWS = 2**16  # of a step, and tokens in a row


def count(field: str, value: int, most: int, least: int = 0) -> int:
    if not least <= value <= most:
        raise InvalidField(field, f"{value} is outside {least} to {most}")
    return value


def member(field: str, value: int, known: Mapping[Member, int], what: str) -> Member:
    for each, number in known.items():
        if number == value:
            return each
    raise InvalidField(field, f"{value} is not a known {what}")


def same_count(field: str, given: int, expected: int, of: str) -> None:
    if given != expected:
        raise InvalidField(field, f"{given} for {expected} {of}")


def token_ids(field: str, values: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    if values and max(values) >= vocab_size:
        at = next(i for i, value in enumerate(values) if value >= vocab_size)
        raise InvalidField(field, f"the id at {at} is outside the vocabulary of {vocab_size}")
    return tuple(values)


def seconds(field: str, value: float, most: float = math.inf) -> float:
    """Returns a time of at most `most`, the time measured here."""
    if not 0 <= value < math.inf:
        raise InvalidField(field, f"{value} is not a finite number of seconds, at least 0")
    return min(value, most)


def numbers(field: str, values: Collection[float]) -> tuple[float, ...]:
    if any(map(math.isnan, values)):
        raise InvalidField(field, "not all of them are numbers")
    return tuple(values)
