"""Free ports for programs that cannot report the port they got from 0."""

from __future__ import annotations

import random
import socket

LISTENING = range(10_240, 32_768)
"""Below the ports of outgoing connections, so none is taken before the program listens."""
_TRIES = 100


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
