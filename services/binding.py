"""Binds a server's ports."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable

from tandem.rpc.endpoint_pool import bare_host, joined


class CannotListen(ValueError):
    """A port cannot be bound."""

    @classmethod
    def at(cls, flag: str, host: str, port: int, error: OSError | None) -> CannotListen:
        reason = error.strerror if error else "gRPC gives no reason"
        if error and error.errno == errno.EADDRNOTAVAIL:
            reason = "this machine has no such address"
        return cls(f"{flag}: cannot listen on {joined(host, port)} ({reason})")


def bound(flag: str, host: str, port: int) -> socket.socket:
    """Returns a bound socket; IPv4 if the name has both. Raises CannotListen."""
    made = None
    try:
        found = socket.getaddrinfo(
            bare_host(host), port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, address = min(found)
        made = socket.socket(family, kind, protocol)  # asyncio sets TCP_NODELAY only with the protocol
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except OSError as error:
        if made:
            made.close()
        raise CannotListen.at(flag, host, port, error) from None
    except UnicodeError:  # of a name that cannot be looked up, as a..b
        raise CannotListen.at(flag, host, port, OSError(errno.EINVAL, "not a name")) from None
    return made


def bind(flag: str, host: str, port: int, add_port: Callable[[str], int]) -> int:
    """Returns the port that a gRPC server's `add_port` binds. Raises CannotListen."""
    try:
        if number := add_port(joined(host, port)):
            return number
    except RuntimeError:
        pass
    bound(flag, host, port).close()  # gRPC logs the reason alone
    raise CannotListen.at(flag, host, port, None)
