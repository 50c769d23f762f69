"""--health_port, which Kubernetes' probes ask, and free ports for programs that cannot listen on port 0."""

from __future__ import annotations

import socket
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.launch import LISTENING, check_free, free_port
from tandem.rpc.channel import open_channel
from tandem.v1 import target_verifier_pb2 as pb
from tests.support import HANG, launch, raw_stub, role_configured, run, server_process


def test_the_health_port_answers_health_checks_and_nothing_else(tmp_path: Path) -> None:
    port = free_port()
    probed = f"127.0.0.1:{port}"

    async def test() -> None:
        async with open_channel(probed) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            for service in ("", "tandem.v1.TargetVerifier"):
                reply = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=HANG)
                assert reply.status == health_pb2.HealthCheckResponse.SERVING
        async with raw_stub(probed) as target:
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await target.CloseSession(pb.CloseSessionRequest(session_id="s"))
            assert failed.value.code() is grpc.StatusCode.UNIMPLEMENTED

    with server_process(tmp_path, "--role", "target", "--health_port", str(port)) as server:
        run(test())
        taken = launch(tmp_path, "--role", "target", "--backend", "toy", "--port", "0", "--health_port", str(port))
        assert server.stop() == 0
    assert taken.returncode == 2
    assert f"main.py: health_port: cannot listen on {probed}" in taken.stderr.splitlines()[-1]


def test_a_health_port_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="health_port: 0 is outside 1 to 65535"):
        role_configured("target", health_port="0")


def test_a_free_port_can_be_listened_on_and_is_none_that_connections_take() -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", port)), socket.create_server(("127.0.0.1", 0)) as ephemeral:
        assert port in LISTENING and ephemeral.getsockname()[1] not in LISTENING
        with pytest.raises(OSError):
            check_free("127.0.0.1", port)


def test_ports_that_are_taken_are_passed_over_and_if_all_are_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", free_port())) as taken:
        number = taken.getsockname()[1]
        monkeypatch.setattr("tandem.launch.LISTENING", [number] * 99 + [(free := free_port())])
        assert free_port() == free
        monkeypatch.setattr("tandem.launch.LISTENING", [number] * 100)
        with pytest.raises(OSError, match="are all taken"):
            free_port()
