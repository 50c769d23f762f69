"""Finds free ports for programs that cannot listen on port 0 and say which one they got."""

from __future__ import annotations

import random
import socket

LISTENING = range(10_240, 32_768)
"""Systems take the ports of connections from above these, so nothing takes one before the program listens on it."""
_TRIES = 100


def free_port(host: str = "127.0.0.1") -> int:
    """Returns a port of LISTENING that nobody listens on. Raises OSError if none is found."""
    for port in random.sample(LISTENING, _TRIES):
        try:
            check_free(host, port)
        except OSError:
            continue
        return port
    raise OSError(f"{_TRIES} ports between {LISTENING[0]} and {LISTENING[-1]} are all taken")


def check_free(host: str, port: int) -> None:
    """Raises OSError if `port` cannot be listened on."""
    socket.create_server((host, port)).close()
