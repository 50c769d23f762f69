"""Tandem on Ray Serve without a cluster: routing, settings, and the import name `proto`."""

from __future__ import annotations

import enum
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import Mock

import grpc
import pytest

from tandem.rpc.channel import DRAFT, TARGET
from tandem.workshops.ray_serve import calls
from tandem.workshops.ray_serve.application import main
from tandem.workshops.ray_serve.application import run as deploy
from tandem.workshops.ray_serve.calls import RoutedContext
from tests.support import REPOSITORY, run

AUTHORIZED = ("authorization", "Bearer x")


class Refused(Exception):
    """A call that was ended with a status."""


class Context:
    """A call's context at the proxy."""

    def __init__(self, code: grpc.StatusCode, trailing: tuple[tuple[str, bytes], ...] = ()) -> None:
        self._code, self._trailing = code, trailing
        self.address = "ipv4:127.0.0.1:5"

    def peer(self) -> str:
        return self.address

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise Refused(f"{code.name}: {details}")

    def code(self) -> grpc.StatusCode:
        return self._code

    def set_code(self, code: grpc.StatusCode) -> None:
        self._code = code

    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:
        return self._trailing

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return (AUTHORIZED,)


def test_a_call_is_routed_by_its_service_and_session() -> None:
    routed = RoutedContext(Context(grpc.StatusCode.OK), TARGET, "s")
    assert routed.invocation_metadata() == (AUTHORIZED, ("application", TARGET), ("session_id", "s"))
    assert RoutedContext(Context(grpc.StatusCode.OK), DRAFT, "").invocation_metadata() == (
        AUTHORIZED,
        ("application", DRAFT),
    )


class Kind(enum.Enum):
    """Ray's names for the kinds of a call."""

    UNARY_UNARY, UNARY_STREAM, STREAM_STREAM = range(3)


class Server:
    """Stands in for Serve's gRPC server: it registers a service, and its handlers answer every call."""

    def __init__(self) -> None:
        self.handlers: dict[Kind, Any] = {}

    @staticmethod
    def service_handler_factory(service_method: str, streaming_type: Kind) -> Any:
        async def unary(request: Any, context: Any) -> str:
            return "answered"

        async def stream(request: Any, context: Any) -> AsyncIterator[str]:
            yield "answered"

        return unary if streaming_type is Kind.UNARY_UNARY else stream

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        make = self.service_handler_factory
        self.handlers = {kind: make(service_method="/a.b/c", streaming_type=kind) for kind in Kind}


async def said(handler: Any, kind: Kind, peer: str) -> str:
    """Calls a handler from this address; returns the reply, or the status that ended the call."""
    context = Context(grpc.StatusCode.OK)
    context.address = peer
    try:
        if kind is Kind.UNARY_UNARY:
            return str(await handler("x", context))
        requests = requests_of("x") if kind is Kind.STREAM_STREAM else "x"
        return "".join([each async for each in handler(requests, context)])
    except Refused as refused:
        return str(refused)


async def requests_of(request: str) -> AsyncIterator[str]:
    yield request


HERE = ("ipv4:127.0.0.1:5", "ipv6:%5B::1%5D:5", "ipv6:[::1]:5")
ELSEWHERE = ("ipv4:10.0.0.7:5", "ipv6:%5Bfe80::7%5D:5", "", "unknown")


@pytest.mark.parametrize("kind", Kind, ids=lambda kind: str(kind.name))
def test_a_proxy_answers_its_own_host_alone(kind: Kind) -> None:
    server = Server()
    calls.register(Mock(), server)
    handler = server.handlers[kind]
    assert {run(said(handler, kind, peer)) for peer in HERE} == {"answered"}
    assert {run(said(handler, kind, peer)) for peer in ELSEWHERE} == {f"PERMISSION_DENIED: {calls.OTHER_HOST}"}


def test_only_a_failure_of_rays_own_is_unavailable() -> None:
    server = Server()
    calls.register(Mock(), server)
    for trailing, code in (((calls.DETAILS, b"..."),), grpc.StatusCode.INTERNAL), ((), grpc.StatusCode.UNAVAILABLE):
        context = Context(grpc.StatusCode.INTERNAL, trailing)
        run(server.handlers[Kind.UNARY_UNARY]("x", context))
        assert context.code() is code


def test_only_server_roles_can_be_deployed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="role: client is not one of target, fused_target, draft_worker, prefill"):
        deploy(("--role", "client"))


def test_without_ray_there_is_one_line_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["--", "--role", "target"]) == 2
    assert capsys.readouterr().err == "ray_serve: ray is not installed: make setup\n"


def test_the_import_name_proto_stays_that_of_proto_plus() -> None:
    """Ray's dependencies import it; our folder of that name holds text, and stands first on the path."""
    pytest.importorskip("proto", reason="proto-plus is absent, as ray is")
    program = "import proto, google.api_core.rest_streaming; print(proto.Message.__name__, proto.__file__)"
    shown = subprocess.run(
        [sys.executable, "-c", program],
        cwd=REPOSITORY,
        env={"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
    )
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith("Message ") and "site-packages" in shown.stdout
