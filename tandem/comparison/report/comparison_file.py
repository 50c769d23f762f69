"""Reads the comparison.json of an earlier run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 2
"""Incremented when the meaning of a key changes or a key is removed, not for new keys."""


def read_comparison(path: Path, flag: str = "report") -> dict[str, Any]:
    """Reads and checks a comparison.json. Raises a one-line ValueError."""
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
