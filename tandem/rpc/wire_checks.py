"""Checks ids, counts and times in messages of servers, where they become our types. All raise InvalidField.

What comes from a server is checked like what comes from a client: a wrong number must end its own call, not a process.
Texts name fields and counts, never token ids, because they are logged.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

from tandem.speculation.types import InvalidField

Member = TypeVar("Member")
MOST_TOKENS = 2**26
"""Most tokens that a message may state, of a vocabulary or of a sequence."""
MOST_NAME = 256
"""Limit of the characters of a name."""
MOST_ROWS = 2**16
"""Limit of the rows of a step, and of the tokens of one of them."""


def count(field: str, value: int, most: int, least: int = 0) -> int:
    """Returns a count from `least` to `most`."""
    if not least <= value <= most:
        raise InvalidField(field, f"{value} is outside {least} to {most}")
    return value


def member(field: str, value: int, known: Mapping[Member, int], what: str) -> Member:
    """Returns the member of an enum that `value` stands for."""
    for each, number in known.items():
        if number == value:
            return each
    raise InvalidField(field, f"{value} is not a known {what}")


def same_count(field: str, given: int, expected: int, of: str) -> None:
    """Checks that there is one entry for each of what `of` names, or none if none was asked for."""
    if given != expected:
        raise InvalidField(field, f"{given} for {expected} {of}")


def token_ids(field: str, values: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """Returns ids that are all below `vocab_size`."""
    if values and max(values) >= vocab_size:
        at = next(i for i, value in enumerate(values) if value >= vocab_size)
        raise InvalidField(field, f"the id at {at} is outside the vocabulary of {vocab_size}")
    return tuple(values)


def seconds(field: str, value: float, most: float = math.inf) -> float:
    """Returns a time, at most `most`, which is what was measured here: no server takes longer than its answer."""
    if not 0 <= value < math.inf:
        raise InvalidField(field, f"{value} is not a finite number of seconds, at least 0")
    return min(value, most)


def numbers(field: str, values: Collection[float]) -> tuple[float, ...]:
    """Returns values none of which is NaN."""
    if any(map(math.isnan, values)):
        raise InvalidField(field, "not all of them are numbers")
    return tuple(values)
