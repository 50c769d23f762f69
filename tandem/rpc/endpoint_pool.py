"""Selects the server to call: any with the same target gives the same output. Pure: the clock is an argument."""

from __future__ import annotations

import ipaddress
import logging
import time
from collections.abc import Callable, Collection, Sequence

from tandem.speculation.types import InvalidField, ModelInfo

log = logging.getLogger("tandem.endpoints")

CHECK_SECONDS = 5.0  # for a failed or new server to report its model
# Different weights, another precision, or another kind of device give different bits.
_SAME = ("model_name", "weights_revision", "tokenizer_sha256", "vocab_size", "dtype", "device", "backend")
_NO_LESS = ("max_sequence_length", "max_speculation_length")


class EndpointPool:
    """Servers in order, and the current one, which changes when it fails."""

    def __init__(self, addresses: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        self.addresses, self._clock = tuple(addresses), clock
        self.current = self.addresses[0]
        self.refused: dict[str, str] = {}
        self._silent: dict[str, float] = {}  # since when
        self._attempts = 0

    def __str__(self) -> str:
        return ", ".join(self.addresses)

    def after(self, address: str) -> str:
        """Returns the next address that is not refused, else `address`."""
        return self.following(address, (address,)) or address

    def turns(self, preferred: str) -> tuple[str, ...]:
        at = self.addresses.index(preferred)
        return tuple(each for each in (*self.addresses[at:], *self.addresses[:at]) if each not in self.refused)

    def following(self, preferred: str, exclude: Collection[str] = ()) -> str | None:
        """Returns the first address from `preferred` on that is neither in `exclude` nor refused."""
        return next((each for each in self.turns(preferred) if each not in exclude), None)

    def failed(self, address: str, reason: str) -> None:
        self._attempts += 1
        other = self.after(address)
        if self.current == address:
            self.current = other
        if address not in self._silent:
            self._silent[address] = self._clock()
            then = "trying again" if other == address else f"trying {other}"
            log.warning("server at %s failed (%s): %s", address, " ".join(reason.split()), then)

    def answered(self, address: str) -> None:
        if self._silent:
            down = self._clock() - min(self._silent.values())
            log.info("server at %s answers, after %d attempts and %.1f s", address, self._attempts, down)
        self._silent.clear()
        self.refused.pop(address, None)
        self.current, self._attempts = address, 0

    def refuse(self, address: str, reason: str) -> bool:
        """Excludes a server with another model; returns whether any is left, else clears all exclusions."""
        if self.refused.get(address) != reason:
            log.error("server at %s is not used: %s", address, reason)
        self.refused[address] = reason
        self.current = self.after(address)
        left = self.current not in self.refused
        if not left:
            self.refused.clear()
        return left


def disagreement(first: ModelInfo, other: ModelInfo) -> str | None:
    """Returns why `other` cannot continue a session of `first` with the same tokens, or None."""
    for name in _SAME:
        expected, found = getattr(first, name), getattr(other, name)
        if expected != found:
            return f"its {name} is {found!r}, but this client started with {expected!r}"
    for name in _NO_LESS:
        expected, found = getattr(first, name), getattr(other, name)
        if found < expected:
            return f"its {name} is {found}, below the {expected} that this client started with"
    return None


def parse_addresses(given: str, field: str = "target_host") -> tuple[str, ...]:
    """Splits HOST:PORT[,HOST:PORT...]. Raises ValueError naming the field."""
    addresses = []
    for address in map(str.strip, given.split(",")):
        host, _, port = address.rpartition(":")
        if scheme := address.partition("://")[0] if "://" in address else "":
            bare = address[len(scheme) + 3 :].partition("/")[0]
            like = f", as {bare!r}" if ":" in bare else ""
            raise InvalidField(field, f"{address!r} has the scheme {scheme}://; give HOST:PORT alone{like}")
        if not (host and port.isdecimal() and 0 < int(port) < 65536):
            raise InvalidField(field, f"{address!r} is not HOST:PORT")
        if ":" in host and not host.startswith("["):
            raise InvalidField(field, f"{address!r} may be an address alone; with a port it is [{host}]:{port}")
        addresses.append(joined(host, int(port), field))
    if len(set(addresses)) < len(addresses):
        raise InvalidField(field, f"{given!r} names a server twice")
    return tuple(addresses)


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
