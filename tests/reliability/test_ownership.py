"""Sessions belong to the identity that opened them; without that check, this test fails.

Identities are said by metadata here: how a server tells callers apart is tests/services' own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest

from services import identity
from tandem.v1 import target_verifier_pb2 as pb
from tests.conformance.bench import refused
from tests.reliability.mutants import OWNERSHIP, planted
from tests.support import GREEDY, oracle, raw_stub, run, target_site

PROMPT = [1, 2, 3]


class SaysWho(grpc.aio.ServerInterceptor):
    """The caller is whom its metadata names."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        names = [value for key, value in handler_call_details.invocation_metadata if key == "who"]
        coders = {
            "request_deserializer": handler.request_deserializer,
            "response_serializer": handler.response_serializer,
        }

        async def unary(request: Any, context: grpc.aio.ServicerContext) -> Any:
            identity._CALLER.set(names[0])
            return await handler.unary_unary(request, context)

        async def stream(requests: Any, context: grpc.aio.ServicerContext) -> Any:
            identity._CALLER.set(names[0])
            async with contextlib.aclosing(handler.stream_stream(requests, context)) as replies:
                async for reply in replies:
                    yield reply

        if handler.unary_unary:
            return grpc.unary_unary_rpc_method_handler(unary, **coders)
        return grpc.stream_stream_rpc_method_handler(stream, **coders)


async def sessions_are_their_owners() -> None:
    """Another identity's Verify, stream, and Close find nothing; its open of the same id is a session of its own."""
    mine, other = {"metadata": (("who", "me"),)}, {"metadata": (("who", "other"),)}
    opening = pb.OpenSessionRequest(session_id="s", prefix=PROMPT, prompt_length=3)
    round_ = pb.VerifyRequest(session_id="s", base_length=3, last_token=3)
    async with target_site(interceptors=[SaysWho()]) as site, raw_stub(site.address) as target:
        await target.OpenSession(opening, **mine)
        for call in (target.Verify(round_, **other), target.VerifyStream(iter([round_]), **other)):
            refusal = await refused(call)
            assert (refusal.code, refusal.reason) == ("NOT_FOUND", "SESSION_NOT_FOUND"), refusal
        await target.OpenSession(pb.OpenSessionRequest(session_id="s", prefix=[9], prompt_length=1), **other)
        for theirs in (True, False):
            assert (await target.CloseSession(pb.CloseSessionRequest(session_id="s"), **other)).closed == theirs
        reply = await target.Verify(round_, **mine)
        assert tuple(reply.token_ids) == oracle(PROMPT, GREEDY, 1)


def test_a_session_is_its_owners() -> None:
    run(sessions_are_their_owners())


def test_without_the_check_the_test_fails() -> None:
    with planted(OWNERSHIP), pytest.raises((AssertionError, grpc.RpcError)):
        run(sessions_are_their_owners())
