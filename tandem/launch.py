"""How one of our processes starts another: with the same interpreter and the same copy of this package."""

from __future__ import annotations

import os
import sys
from pathlib import Path

LAUNCH = (sys.executable, "-m", "tandem")
"""Starts a role; arguments follow. Run it with `environment()`."""
_ROOT = Path(__file__).resolve().parents[1]


def environment() -> dict[str, str]:
    """Ours, with this package importable: a checkout need not be installed."""
    path = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
