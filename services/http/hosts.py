"""Checks the Host header where no key is asked for: a page of another site could reach this server under its own name.

That is DNS rebinding: the browser takes both for one origin. An address as the host is nobody's name.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable

ANY = "*"


class AllowedHosts:
    """The names under which a server answers without keys: this machine's, those given, and any address."""

    def __init__(self, listens_at: str, given: Iterable[str]) -> None:
        self._any = ANY in given
        self._names = {"localhost", socket.gethostname().lower(), listens_at.lower(), *(name.lower() for name in given)}

    def take(self, header: str | None) -> bool:
        """Whether a Host header is allowed; without one no browser has sent the request."""
        if self._any or not header:
            return True
        name = header.strip().lower()
        name = name.partition("]")[0].lstrip("[") if name.startswith("[") else name.rpartition(":")[0] or name
        return name.rstrip(".") in self._names or name.endswith(".localhost") or _is_address(name)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
