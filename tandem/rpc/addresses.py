"""Hosts and addresses; IPv6 addresses have brackets before a port."""

from __future__ import annotations

import ipaddress

from tandem.speculation.types import InvalidField


def bare_host(given: str, field: str = "host") -> str:
    """Returns a host without brackets, IPv6 in its shortest spelling. Raises InvalidField."""
    inner = given[1:-1] if given.startswith("[") and given.endswith("]") else given
    if inner == given and ":" not in given:
        return given
    if not is_ipv6(inner):
        how = "a name, IPv4, or IPv6, which is in brackets where a port follows, as [::1]:50051"
        raise InvalidField(field, f"{given!r} is not {how}")
    return str(ipaddress.IPv6Address(inner))


def is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def bracketed(given: str, field: str = "host") -> str:
    host = bare_host(given, field)
    return f"[{host}]" if ":" in host else host


def joined(host: str, port: int, field: str = "host") -> str:
    return f"{bracketed(host, field)}:{port}"


def has_port(address: str) -> bool:
    return address.count(":") == 1 or (address.startswith("[") and ":" in address.rpartition("]")[2])
