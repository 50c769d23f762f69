"""Starts a role in another process with the same interpreter and package."""

from __future__ import annotations

import os
import sys
from pathlib import Path

LAUNCH = (sys.executable, "-m", "tandem")
"""Append the role's arguments; run with `environment()`."""
_ROOT = Path(__file__).resolve().parents[1]


def environment() -> dict[str, str]:
    """This process's environment, with the package importable from a checkout."""
    path = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


def checkout() -> Path | None:
    """The checkout that this package runs from; None if it is installed."""
    return _ROOT if (_ROOT / "pyproject.toml").is_file() else None
