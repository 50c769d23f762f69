"""Suggests the right spelling of a name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

LIKE = 0.7
"""Least similarity (difflib)."""
_NOT_ONE_OF = re.compile(r"'([^']*)' is not one of:? ([\w.-]+(?:, [\w.-]+)*)")


def meant(name: str, names: Iterable[str]) -> str:
    """Returns "; did you mean X?" for the names that resemble `name` or begin with it; else ""."""
    known: dict[str, str] = {}
    for each in names:
        known.setdefault(_plain(each), each)
    plain = _plain(name)
    likely = difflib.get_close_matches(plain, known, 1, LIKE)
    likely += [each for each in known if plain and each.startswith(plain)]
    return f"; did you mean {known[likely[0]]}?" if likely else ""


def _plain(name: str) -> str:
    return name.strip("-").replace("-", "_").lower()


def hinted(message: str) -> str:
    """Adds a suggestion to a refusal that lists the valid values; returns other messages unchanged."""
    refused = _NOT_ONE_OF.search(message)
    return message + meant(refused[1], refused[2].split(", ")) if refused else message
