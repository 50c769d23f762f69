"""Starts a role in another process, with the same interpreter and the same copy of this package."""

from __future__ import annotations

import os
import sys
from pathlib import Path

LAUNCH = (sys.executable, "-m", "tandem")
"""The command that starts a role; append its arguments, and run it with `environment()`."""
_ROOT = Path(__file__).resolve().parents[1]


def environment() -> dict[str, str]:
    """Returns this process's environment, with the package importable even from a checkout that is not installed."""
    path = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


def checkout() -> Path | None:
    """Returns the folder of the checkout that this package runs from; None if it was installed among others."""
    return _ROOT if (_ROOT / "pyproject.toml").is_file() else None
