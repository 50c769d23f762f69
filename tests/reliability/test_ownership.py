"""Sessions belong to the identity that opened them, and a call shows one identity; without these checks, tests fail.

The first says identities by metadata: how a server tells callers apart is tests/services' own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc

from tandem.services.security import identity
from tandem.services.security.config import Security
from tandem.services.security.tokens import AcceptedTokens
from tandem.v1 import target_verifier_pb2 as pb
from tests.conformance.bench import refused
from tests.services.certificates import token_file
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


async def a_call_shows_one_token(folder: Path) -> None:
    """Two of them, known or not, in either order, are refused: there would be two callers."""
    tokens = ("alices-token-0123456789", "bobs-token-0123456789ab")
    accepted = token_file(folder / "accepted", f"alice {tokens[0]}\nbob {tokens[1]}\n")
    said = [("authorization", f"Bearer {token}") for token in (*tokens, "a-token-that-nobody-knows")]
    async with (
        target_site(security=Security(tokens=AcceptedTokens(accepted))) as site,
        raw_stub(site.address) as target,
    ):
        for pair in ((0, 1), (1, 0), (0, 0), (0, 2), (2, 0)):
            opening = pb.OpenSessionRequest(session_id="s", prefix=PROMPT, prompt_length=3)
            refusal = await refused(target.OpenSession(opening, metadata=tuple(said[i] for i in pair)))
            assert (refusal.code, refusal.reason) == ("UNAUTHENTICATED", "UNAUTHENTICATED"), (pair, refusal)
        assert not len(site.verifier.sessions)


def test_a_call_with_two_tokens_is_refused(tmp_path: Path) -> None:
    run(a_call_shows_one_token(tmp_path))
