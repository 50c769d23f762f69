"""Identifies callers by token or client certificate, before any other work of a call."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextvars import ContextVar
from typing import Any

import grpc

from tandem.rpc.request_context import PREFIX_SCOPE, set_prefix_scope
from tandem.services.errors import Unauthenticated, abort
from tandem.services.security.tokens import AcceptedTokens
from tandem.services.wrapping import Stream, Unary, wrapped

ANONYMOUS = ""
REMEMBERED_CERTIFICATES = 1024
_CALLER: ContextVar[str] = ContextVar("caller", default=ANONYMOUS)
_OPEN = "/grpc.health.v1.Health/"  # probes have no token, and learn only readiness
_SCHEME = "bearer "


def caller() -> str:
    """Returns the identity of the current call; ANONYMOUS without tokens or client certificates."""
    return _CALLER.get()


class IdentityInterceptor(grpc.aio.ServerInterceptor):
    """Requires a known token, if tokens are configured; the identity is the token's, else the certificate's.

    Runs after ErrorInterceptor and before all others. Health checks need no token. Tokens are checked before the
    request is read; certificates were checked by the handshake.
    """

    def __init__(self, tokens: AcceptedTokens | None = None) -> None:
        self._tokens = tokens
        self._named: Callable[[bytes], str] | None = None

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(_OPEN):
            return handler
        metadata = handler_call_details.invocation_metadata
        if self._tokens is None:
            forwarded = _forwarded(metadata)
            return wrapped(
                handler, lambda method: self._unary(method, forwarded), lambda method: self._stream(method, forwarded)
            )
        try:
            _identified(self._of_token(self._tokens, metadata), _forwarded(metadata))
        except Unauthenticated as error:
            return _refusing(handler, error)
        return handler

    def _unary(self, method: Unary, forwarded: str) -> Unary:
        async def identified(request: Any, context: grpc.aio.ServicerContext) -> Any:
            await self._identify(context, forwarded)
            return await method(request, context)

        return identified

    def _stream(self, method: Stream, forwarded: str) -> Stream:
        async def identified(request: Any, context: grpc.aio.ServicerContext) -> AsyncGenerator[Any, None]:
            await self._identify(context, forwarded)
            async with contextlib.aclosing(method(request, context)) as replies:
                async for reply in replies:
                    yield reply

        return identified

    async def _identify(self, context: grpc.aio.ServicerContext, forwarded: str) -> None:
        """Sets the identity for this call only: each call runs in its own task."""
        try:
            _identified(self._certified(context), forwarded)
        except Unauthenticated as error:
            await abort(context, error)

    def _of_token(self, tokens: AcceptedTokens, metadata: Any) -> str:
        given = [value for key, value in metadata or () if key == "authorization"]
        if len(given) != 1 or not given[0].lower().startswith(_SCHEME):
            raise Unauthenticated("no token: this server requires one, as metadata `authorization: Bearer TOKEN`")
        identity = tokens.identity(given[0][len(_SCHEME) :].strip())
        if identity is None:
            raise Unauthenticated("unknown token: it is wrong, or was revoked")
        return identity

    def _certified(self, context: grpc.aio.ServicerContext) -> str:
        """Returns the identity in the client's certificate; ANONYMOUS without mTLS."""
        shown = context.auth_context().get("x509_pem_cert")
        if not shown:
            return ANONYMOUS
        self._named = self._named or _names()
        try:
            return self._named(shown[0])
        except ValueError as error:
            raise Unauthenticated(f"the client's certificate has no usable name: {error}") from None


def _identified(identity: str, forwarded: str) -> None:
    """Makes `identity` the caller of the current call, and sets the scope of its prefixes."""
    _CALLER.set(identity)
    set_prefix_scope(identity, forwarded)


def _forwarded(metadata: Any) -> str:
    """Returns the scope that the caller names for whom it calls for, or ""."""
    return next((str(value) for key, value in metadata or () if key == PREFIX_SCOPE), "")


def _names() -> Callable[[bytes], str]:
    """Returns a cached reader of certificates: a caller presents the same one in every call."""
    from tandem.services.security.certificates import identity_of

    return functools.lru_cache(REMEMBERED_CERTIFICATES)(identity_of)


def _refusing(handler: grpc.RpcMethodHandler, error: Unauthenticated) -> grpc.RpcMethodHandler:
    """Returns a handler of the same kind that refuses the call without reading the request."""

    def unary(method: Unary) -> Unary:
        async def refused(request: Any, context: grpc.aio.ServicerContext) -> Any:
            await abort(context, error)

        return refused

    def stream(method: Stream) -> Stream:
        async def refused(request: Any, context: grpc.aio.ServicerContext) -> AsyncGenerator[Any, None]:
            await abort(context, error)
            yield

        return refused

    return wrapped(handler, unary, stream, request_deserializer=None)
