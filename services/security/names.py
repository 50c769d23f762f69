"""Validates callers' names, so that errors and logs may quote them."""

from __future__ import annotations

from tandem.speculation.types import InvalidField

MAX_NAME = 256


def check_name(field: str, given: str, least: int = 0, most: int = MAX_NAME) -> str:
    """Returns `given` if of `least` to `most` printable characters; raises InvalidField without quoting it."""
    if not least <= len(given) <= most:
        raise InvalidField(field, f"length {len(given)} is outside {least} to {most}")
    if not given.isprintable():
        raise InvalidField(field, "it has characters that cannot be printed")
    return given
