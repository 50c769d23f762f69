"""Suggests the name that a misspelt one may stand for."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

LIKE = 0.7
"""The least similarity of a suggested name, as difflib measures it."""
_NOT_ONE_OF = re.compile(r"'([^']*)' is not one of:? ([\w.-]+(?:, [\w.-]+)*)")


def meant(name: str, names: Iterable[str]) -> str:
    """Returns "; did you mean X?", with what `names` has that is like the name or begins with it; "" if nothing is."""
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
    """Returns a refusal that names the values there are, with the one that may have been meant; others as they are."""
    refused = _NOT_ONE_OF.search(message)
    return message + meant(refused[1], refused[2].split(", ")) if refused else message
