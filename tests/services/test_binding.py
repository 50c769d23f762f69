"""Every host flag takes IPv6 in every spelling; a port that cannot be bound says why."""

from __future__ import annotations

import contextlib
import json
import socket
from pathlib import Path

import grpc
import httpx2
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.launch import free_port
from tandem.services.binding import CannotListen, bind, bound
from tests.support import HANG, launch, run_here, server_process

with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as probe:
    probe.bind(("::1", 0))
    HAS_IPV6 = True
pytestmark = pytest.mark.skipif("HAS_IPV6" not in globals(), reason="this machine has no IPv6")


SPELLINGS = {"::1": "::1", "[::1]": "::1", "0:0:0:0:0:0:0:1": "::1", "::1%1": "::1%1", "::": "::", "[::]": "::"}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_all_ports_of_a_server_are_reached_at_ipv6_in_every_spelling(spelling: str, tmp_path: Path) -> None:
    probes = free_port()
    hosts = [part for name in ("host", "http_host", "metrics_host") for part in (f"--{name}", spelling)]
    ports = ("--http_port", "0", "--metrics_port", "0", "--health_port", str(probes), "--insecure")
    with server_process(tmp_path, "--role", "fused_target", *hosts, *ports) as server:
        ready = json.loads(server.ready_file.read_text())
        for port, path in (("http_port", "v1/models"), ("metrics_port", "metrics")):
            assert httpx2.get(f"http://[::1]:{ready[port]}/{path}", timeout=HANG).status_code == 200
        assert {ready[f"{name}host"] for name in ("", "http_", "metrics_")} == {f"[{SPELLINGS[spelling]}]"}
        with grpc.insecure_channel(f"[::1]:{probes}") as channel:
            assert health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=HANG).status == 1
        asking = ("--role", "fused_client", "--prompt", "a", "--max_new_tokens", "3")
        for target in (f"[::1]:{server.port}", f"[0:0:0:0:0:0:0:1]:{server.port}"):
            assert run_here(tmp_path, *asking, "--target_host", target).returncode == 0
        assert run_here(tmp_path, *asking, "--target_host", "::1", "--port", str(server.port)).returncode == 0


def test_a_port_that_cannot_be_bound_says_why(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        why = {
            ("127.0.0.1", port): rf"127.0.0.1:{port} \(Address already in use\)",
            ("2001:db8::1", 0): r"\[2001:db8::1\]:0 \(this machine has no such address\)",
            ("nobody.invalid", 0): r"nobody.invalid:0 \(.*not known.*\)",
            ("a..b", 0): r"a..b:0 \(not a name\)",
        }
        for (host, number), reason in why.items():
            with pytest.raises(CannotListen, match=rf"^http_port: cannot listen on {reason}$"):
                bound("http_port", host, number).close()
            with pytest.raises(CannotListen, match=rf"^port: cannot listen on {reason}$"):
                bind("port", host, number, grpc.server(None).add_insecure_port)
    for flag in ("host", "http_host", "metrics_host"):
        ports = ("--http_port", "0", "--metrics_port", "0", "--port", "0")
        ended = launch(tmp_path, "--role", "fused_target", "--backend", "toy", *ports, f"--{flag}", "[nobody]")
        (line,) = ended.stderr.splitlines()
        assert ended.returncode == 2 and line.startswith(f"main.py: {flag}: '[nobody]' is not a name, IPv4, or IPv6")
