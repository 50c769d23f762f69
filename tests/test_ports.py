"""Free ports for programs that cannot listen on port 0."""

from __future__ import annotations

import socket

import pytest

from tandem import ports


def test_a_free_port_can_be_listened_on_and_is_none_that_connections_take() -> None:
    port = ports.free_port()
    with socket.create_server(("127.0.0.1", port)), socket.create_server(("127.0.0.1", 0)) as ephemeral:
        assert port in ports.LISTENING and ephemeral.getsockname()[1] not in ports.LISTENING
        with pytest.raises(OSError):
            ports.check_free("127.0.0.1", port)


def test_ports_that_are_taken_are_passed_over_and_if_all_are_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", ports.free_port())) as taken:
        number = taken.getsockname()[1]
        monkeypatch.setattr(ports, "LISTENING", [number] * 99 + [(free := ports.free_port())])
        assert ports.free_port() == free
        monkeypatch.setattr(ports, "LISTENING", [number] * 100)
        with pytest.raises(OSError, match="are all taken"):
            ports.free_port()
