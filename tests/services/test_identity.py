"""Sessions are their caller's: by no method do they exist for another identity. And nobody unknown gets that far."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

from tandem.rpc import wire
from tandem.rpc.channel import DRAFT, FUSED, MESSAGES, TARGET, open_channel
from tandem.rpc.credentials import Credentials
from tandem.services.security.access import Security
from tandem.services.security.callers import AcceptedTokens
from tandem.v1 import draft_worker_pb2, target_verifier_pb2
from tests.services.certificates import Authority, token_file
from tests.support import GREEDY, listening, opening, raw_stub, refusal, target_site, verifying

TOKENS = {"alice": "alices-token-0123456789", "bob": "bobs-token-0123456789ab"}


class ByToken:
    """Callers told apart by their tokens."""

    def __init__(self, folder) -> None:
        lines = "".join(f"{name} {token}\n" for name, token in TOKENS.items())
        self.security = Security(tokens=AcceptedTokens(token_file(folder / "accepted", lines)))
        self._folder = folder

    def credentials(self, name: str) -> Credentials:
        return Credentials(token_file=token_file(self._folder / name, TOKENS[name]))


class ByCertificate:
    """Callers told apart by their certificates' names."""

    def __init__(self, folder) -> None:
        self._authority = Authority(folder)
        self.security = Security(tls=self._authority.server(mutual=True))

    def credentials(self, name: str) -> Credentials:
        return self._authority.client(f"{name}.example")


@pytest.fixture(params=[ByToken, ByCertificate])
def callers(request, tmp_path) -> Any:
    return request.param(tmp_path)


async def verify(stub: Any, name: str) -> Any:
    return await stub.Verify(verifying(name=name))


async def verify_stream(stub: Any, name: str) -> Any:
    async def requests():
        yield verifying(name=name)

    return [reply async for reply in stub.VerifyStream(requests())]


@pytest.mark.parametrize("method", [verify, verify_stream])
async def test_anothers_session_is_not_found_as_one_that_never_was(callers, method):
    async with (
        target_site(security=callers.security) as site,
        raw_stub(site.address, TARGET, callers.credentials("alice")) as alice,
        raw_stub(site.address, TARGET, callers.credentials("bob")) as bob,
    ):
        await alice.OpenSession(opening("alices"))
        theirs, nobodys = await refusal(method(bob, "alices")), await refusal(method(bob, "nobodys"))
        assert await method(alice, "alices"), "and alice's goes on"
    assert theirs.code == "NOT_FOUND" and str(theirs) == str(nobodys).replace("nobodys", "alices")


async def test_closing_anothers_session_closes_nothing(callers):
    close = target_verifier_pb2.CloseSessionRequest
    async with (
        target_site(security=callers.security) as site,
        raw_stub(site.address, TARGET, callers.credentials("alice")) as alice,
        raw_stub(site.address, TARGET, callers.credentials("bob")) as bob,
    ):
        await alice.OpenSession(opening())
        closed = [(await bob.CloseSession(close(session_id=name))).closed for name in ("s", "nobodys")]
        assert (await alice.Verify(verifying())).token_ids
        closed.append((await alice.CloseSession(close(session_id="s"))).closed)
    assert closed == [False, False, True]


def proposing(tokens: Sequence[int], k: int = 3, **rest: Any) -> Any:
    sampling = wire.sampling_to_wire(GREEDY)
    return draft_worker_pb2.ProposeRequest(tokens=tokens, speculation_length=k, sampling=sampling, **rest)


METHODS = [
    (service, method.name, method.client_streaming)
    for service in (TARGET, FUSED, DRAFT)
    for method in MESSAGES[service].DESCRIPTOR.services_by_name[service].methods
]


@pytest.mark.parametrize(("service", "method", "streams"), METHODS)
async def test_no_method_is_reached_without_a_token(service, method, streams, tmp_path):
    reached, path = [], f"/tandem.v1.{service}/{method}"

    class Handler(grpc.GenericRpcHandler):
        def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
            async def reply(request: Any, context: Any) -> Any:
                reached.append(details.method)
                yield b""

            kind = grpc.stream_stream_rpc_method_handler if streams else grpc.unary_stream_rpc_method_handler
            return kind(reply)

    async def call(channel: Any) -> Any:
        made = channel.stream_stream(path)(iter([b""])) if streams else channel.unary_stream(path)(b"")
        return [reply async for reply in made]

    callers = ByToken(tmp_path)
    register = lambda server: server.add_generic_rpc_handlers((Handler(),))  # noqa: E731
    async with listening(register, security=callers.security) as address:
        async with open_channel(address) as channel:
            refused = await refusal(call(channel))
        assert not reached
        async with open_channel(address, callers.credentials("alice")) as channel:
            await call(channel)
    assert (refused.code, refused.reason, reached) == ("UNAUTHENTICATED", "UNAUTHENTICATED", [path])


async def test_health_is_open_and_reflection_is_not(tmp_path):
    callers, health = ByToken(tmp_path), HealthServicer()

    def register(server: grpc.aio.Server) -> None:
        health_pb2_grpc.add_HealthServicer_to_server(health, server)
        reflection.enable_server_reflection((reflection.SERVICE_NAME,), server)

    async def listed(channel: Any) -> int:
        asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        replies = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(asked)
        return len([reply async for reply in replies])

    await health.set("", health_pb2.HealthCheckResponse.SERVING)
    async with listening(register, security=callers.security) as address:
        async with open_channel(address) as channel:
            check = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            refused = await refusal(listed(channel))
        async with open_channel(address, callers.credentials("alice")) as channel:
            assert (check.status, refused.code, await listed(channel)) == (
                health_pb2.HealthCheckResponse.SERVING,
                "UNAUTHENTICATED",
                1,
            )
