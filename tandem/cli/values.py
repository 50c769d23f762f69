"""Parses option values: lists, `auto|K`, addresses, credentials."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from tandem.cli.option import built
from tandem.rpc.addresses import has_port, is_ipv6, joined
from tandem.speculation.types import InvalidField

if TYPE_CHECKING:
    from tandem.rpc.credentials import Credentials

Number = TypeVar("Number", int, float)


def split_list(text: str | None) -> tuple[str, ...]:
    """The non-empty parts of a list such as `a, b`."""
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


def numbers(flag: str, text: str | None, kind: Callable[[str], Number]) -> tuple[Number, ...]:
    """The numbers of a list such as `1,2,4`. Raises ValueError."""
    try:
        return tuple(kind(part) for part in split_list(text))
    except ValueError:
        raise ValueError(f"{flag}: {text!r} is not a list of numbers, as in 1,4") from None


def auto_or_count(flag: str, text: str | None) -> int | None:
    """K of `auto|K`; None for `auto` or no text. Raises ValueError."""
    if text is None or text == "auto":
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{flag}: {text!r} is neither a number nor auto") from None


def with_default_ports(hosts: str, port: int) -> str:
    """HOST:PORT for each HOST or HOST:PORT of a list."""
    return ",".join(_with_default_port(host.strip(), port) for host in hosts.split(","))


def _with_default_port(host: str, port: int) -> str:
    if "://" in host or has_port(host):
        return host  # of which the former is refused where addresses are checked
    before, _, last = host.rpartition(":")
    if last.isdecimal() and is_ipv6(before):
        raise InvalidField("target_host", f"{host!r} may be an address, [{host}], or have a port, [{before}]:{last}")
    return joined(host, port, "target_host")


def credentials(options: Any) -> Credentials:
    """Credentials of outgoing calls."""
    from tandem.rpc.credentials import Credentials

    return built(
        Credentials,
        options,
        ca=options.tls_ca,
        cert=options.tls_client_cert,
        key=options.tls_client_key,
        server_name=options.tls_server_name,
    )
