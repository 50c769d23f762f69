"""Hosts in every spelling: one has one form, and what is none is refused in a line that says how."""

from __future__ import annotations

import pytest

from tandem.cli.option import with_default_ports
from tandem.rpc.addresses import bare_host, joined
from tandem.rpc.endpoint_pool import parse_addresses

LOOPBACKS = ("::1", "[::1]", "0:0:0:0:0:0:0:1", "[0:0:0:0:0:0:0:1]", "0000::0001")


@pytest.mark.parametrize(
    ("given", "bare"),
    [
        *((spelling, "::1") for spelling in LOOPBACKS),
        *(("::", "::"), ("[::]", "::"), ("FE80::1%eth0", "fe80::1%eth0"), ("[fe80::1%2]", "fe80::1%2")),
        *((same, same) for same in ("127.0.0.1", "localhost", "a.example")),
    ],
)
def test_a_host_has_one_form_with_and_without_a_port(given: str, bare: str) -> None:
    address = f"[{bare}]:7" if ":" in bare else f"{bare}:7"
    assert (bare_host(given), joined(given, 7)) == (bare, address)
    assert with_default_ports(given, 7) == with_default_ports(address, 8) == address
    assert parse_addresses(address.replace("::1]", "0::0:1]")) == (address,)


@pytest.mark.parametrize("given", ["[::1", "::1]", "[localhost]", "::1:50051", ":::", "1.2.3.4:5", "[1.2.3.4]", "::1%"])
def test_what_is_no_host_is_refused_by_name(given: str) -> None:
    with pytest.raises(ValueError, match=r"^http_host: '.*' is not a name, IPv4, or IPv6.* as \[::1\]:50051$"):
        bare_host(given, "http_host")


@pytest.mark.parametrize("given", ["::1:50051", "::1:8080"])
def test_a_port_behind_a_bare_address_is_refused_and_its_spelling_is_said(given: str) -> None:
    port = given.rpartition(":")[2]
    with pytest.raises(ValueError, match=rf"^target: '{given}' may be .*; with a port it is \[::1\]:{port}$"):
        parse_addresses(given, "target")
    with pytest.raises(ValueError, match=rf"^target_host: '{given}' may be .*\[{given}\], or .* \[::1\]:{port}$"):
        with_default_ports(given, 7)
