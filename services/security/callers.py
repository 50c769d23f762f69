"""Identifies callers by token or certificate before any other work."""

from __future__ import annotations

import functools
from contextvars import ContextVar
from typing import TYPE_CHECKING

import grpc

from tandem.rpc.request_context import PREFIX_SCOPE, set_prefix_scope
from tandem.services.security.tokens import AcceptedTokens
from tandem.services.statuses import Unauthenticated

if TYPE_CHECKING:
    from tandem.services.calls import Call

ANONYMOUS = ""
REMEMBERED_CERTIFICATES = 1024
_CALLER: ContextVar[str] = ContextVar("caller", default=ANONYMOUS)
OPEN = "/grpc.health.v1.Health/"  # probes have no token, and learn only readiness
_SCHEME = "bearer "


def caller() -> str:
    return _CALLER.get()


def identify(tokens: AcceptedTokens | None, call: Call) -> None:
    """Sets the caller and prefix scope of this task, which is the call's own. Raises Unauthenticated."""
    identity = _of_token(tokens, call.given("authorization")) if tokens is not None else _certified(call.context)
    _CALLER.set(identity)
    set_prefix_scope(identity, next(iter(call.given(PREFIX_SCOPE)), ""))


def _of_token(tokens: AcceptedTokens, given: list[str]) -> str:
    if len(given) != 1 or not given[0].lower().startswith(_SCHEME):
        raise Unauthenticated("no token: this server requires one, as metadata `authorization: Bearer TOKEN`")
    identity = tokens.identity(given[0][len(_SCHEME) :].strip())
    if identity is None:
        raise Unauthenticated("unknown token: it is wrong, or was revoked")
    return identity


def _certified(context: grpc.aio.ServicerContext) -> str:
    shown = context.auth_context().get("x509_pem_cert")
    if not shown:
        return ANONYMOUS
    try:
        return _named(shown[0])
    except ValueError as error:
        raise Unauthenticated(f"the client's certificate has no usable name: {error}") from None


@functools.lru_cache(REMEMBERED_CERTIFICATES)
def _named(certificate: bytes) -> str:
    # Cached: a caller presents the same certificate in every call.
    from tandem.services.security.certificates import identity_of

    return identity_of(certificate)
