"""Starts a role in another process with the same interpreter and package, and finds ports for it."""

from __future__ import annotations

import os
import random
import socket
import sys
from pathlib import Path

LAUNCH = (sys.executable, "-m", "tandem")
"""Append the role's arguments; run with `environment()`."""
_ROOT = Path(__file__).resolve().parents[1]
LISTENING = range(10_240, 32_768)
"""Below the ports of outgoing connections, so none is taken before the program listens."""
_TRIES = 100


def environment() -> dict[str, str]:
    """This process's environment, with the package importable from a checkout."""
    path = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


def checkout() -> Path | None:
    """The checkout that this package runs from; None if it is installed."""
    return _ROOT if (_ROOT / "pyproject.toml").is_file() else None


def free_port(host: str = "127.0.0.1") -> int:
    """A free port of LISTENING. Raises OSError if all are taken."""
    for port in random.sample(LISTENING, _TRIES):
        try:
            check_free(host, port)
        except OSError:
            continue
        return port
    raise OSError(f"{_TRIES} ports between {LISTENING[0]} and {LISTENING[-1]} are all taken")


def check_free(host: str, port: int) -> None:
    """Raises OSError if `port` is taken."""
    socket.create_server((host, port)).close()
