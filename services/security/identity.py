"""Identifies callers by token or certificate before any other work."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from contextvars import ContextVar

import grpc

from tandem.rpc.request_context import PREFIX_SCOPE, set_prefix_scope
from tandem.services.errors import Unauthenticated
from tandem.services.layers import Call, Layer
from tandem.services.security.tokens import AcceptedTokens

ANONYMOUS = ""
REMEMBERED_CERTIFICATES = 1024
_CALLER: ContextVar[str] = ContextVar("caller", default=ANONYMOUS)
_OPEN = "/grpc.health.v1.Health/"  # probes have no token, and learn only readiness
_SCHEME = "bearer "


def caller() -> str:
    return _CALLER.get()


class IdentityLayer(Layer):
    """Requires a known token, if configured, before the request is read; health checks need none."""

    def __init__(self, tokens: AcceptedTokens | None = None) -> None:
        self._tokens = tokens
        self._named: Callable[[bytes], str] | None = None

    def covers(self, path: str) -> bool:
        return not path.startswith(_OPEN)

    def around(self, call: Call) -> AbstractAsyncContextManager[None]:
        # Each call has its own task, so its identity and prefix scope are its own.
        identity = self._of_token(self._tokens, call) if self._tokens is not None else self._certified(call.context)
        _CALLER.set(identity)
        set_prefix_scope(identity, next(iter(call.given(PREFIX_SCOPE)), ""))
        return nullcontext()

    def _of_token(self, tokens: AcceptedTokens, call: Call) -> str:
        given = call.given("authorization")
        if len(given) != 1 or not given[0].lower().startswith(_SCHEME):
            raise Unauthenticated("no token: this server requires one, as metadata `authorization: Bearer TOKEN`")
        identity = tokens.identity(given[0][len(_SCHEME) :].strip())
        if identity is None:
            raise Unauthenticated("unknown token: it is wrong, or was revoked")
        return identity

    def _certified(self, context: grpc.aio.ServicerContext) -> str:
        shown = context.auth_context().get("x509_pem_cert")
        if not shown:
            return ANONYMOUS
        self._named = self._named or _names()
        try:
            return self._named(shown[0])
        except ValueError as error:
            raise Unauthenticated(f"the client's certificate has no usable name: {error}") from None


def _names() -> Callable[[bytes], str]:
    # Cached: a caller presents the same certificate in every call.
    from tandem.services.security.certificates import identity_of

    return functools.lru_cache(REMEMBERED_CERTIFICATES)(identity_of)
