"""A comparison.json that an earlier run wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 2
"""Grows when a key changes its meaning or goes away; new keys leave it."""


def read_comparison(path: Path, flag: str = "report") -> dict[str, Any]:
    """A comparison.json. Raises ValueError in one line."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{flag}: {path} does not exist") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{flag}: {path} cannot be read: {' '.join(str(error).split())}") from None
    version = found.get("schema_version") if isinstance(found, dict) else None
    if version != SCHEMA_VERSION:
        raise ValueError(f"{flag}: {path} has schema version {version}, and {SCHEMA_VERSION} is needed: measure again")
    return dict(found)
