"""The current request's id, span and prefix scope, in a context variable and passed on in gRPC metadata."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import hashlib
import re
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tandem.rpc.tracing import Span

REQUEST_ID = "x-request-id"
PREFIX_SCOPE = "x-prefix-scope"
MAX_REQUEST_ID = 128
_ID = re.compile(rf"[!-~]{{1,{MAX_REQUEST_ID}}}")

Metadata = tuple[tuple[str, str], ...]
Attributes = Mapping[str, str | int | float | bool]


@dataclass(frozen=True, slots=True)
class RequestContext:
    """`span` None: untraced. `adapter`: of its port, if it names none."""

    id: str
    span: Span | None = None
    adapter: str = ""


_CURRENT: contextvars.ContextVar[RequestContext | None] = contextvars.ContextVar("tandem_request", default=None)
_SCOPE: contextvars.ContextVar[str] = contextvars.ContextVar("tandem_prefix_scope", default="")


def new_id() -> str:
    return uuid.uuid4().hex


def valid_id(given: str | None) -> bool:
    return given is not None and _ID.fullmatch(given) is not None


def current() -> RequestContext | None:
    return _CURRENT.get()


def current_span() -> Span | None:
    request = _CURRENT.get()
    return request.span if request else None


def prefix_scope() -> str:
    """Returns a hash of the caller's identity, or ""."""
    return _SCOPE.get()


def set_prefix_scope(identity: str, forwarded: str) -> None:
    """Sets the prefix scope of this task and those it starts, as a hash. `forwarded`: the caller's own sub-scope."""
    named = f"{identity}\0{forwarded}" if identity or forwarded else ""
    _SCOPE.set(hashlib.sha256(named.encode()).hexdigest()[:32] if named else "")


def begin(request: RequestContext) -> None:
    _CURRENT.set(request)


@contextlib.contextmanager
def within(span: Span) -> Iterator[None]:
    """Runs the block inside `span` and ends it. The block must not yield: it begins and ends in one task."""
    before = _CURRENT.get()
    token = _CURRENT.set(RequestContext(before.id if before else new_id(), span))
    error = ""
    try:
        yield
    except asyncio.CancelledError:
        span.note({"cancelled": True})
        raise
    except BaseException as raised:
        error = type(raised).__name__  # its message may quote the request
        raise
    finally:
        _CURRENT.reset(token)
        span.end(error)


def outgoing(request: RequestContext | None = None) -> Metadata | None:
    request = request or _CURRENT.get()
    scope: Metadata = ((PREFIX_SCOPE, _SCOPE.get()),) if _SCOPE.get() else ()
    if request is None:
        return scope or None
    headers = request.span.headers() if request.span else ()
    return ((REQUEST_ID, request.id), *headers, *scope)
