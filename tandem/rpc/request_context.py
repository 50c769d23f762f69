"""The request that code runs for: its id and its span, carried from process to process in gRPC metadata.

Both live in a context variable: tasks that a request starts inherit them, and other requests see nothing of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import re
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

REQUEST_ID = "x-request-id"
MAX_REQUEST_ID = 128
_ID = re.compile(rf"[!-~]{{1,{MAX_REQUEST_ID}}}")

Metadata = tuple[tuple[str, str], ...]
Attributes = Mapping[str, str | int | float | bool]


class Span(Protocol):
    """A piece of work in a trace; tandem/rpc/tracing.py has the real ones. Times are seconds of time.time()."""

    def child(
        self, name: str, attributes: Attributes, kind: str = "internal", started: float | None = None
    ) -> Span: ...

    def note(self, attributes: Attributes) -> None: ...

    def end(self, error: str = "", at: float | None = None) -> None: ...

    def headers(self) -> Metadata:
        """traceparent, and tracestate where there is one, as W3C Trace Context writes them."""


@dataclass(frozen=True, slots=True)
class Request:
    """What is known about a request wherever something is done for it. `span` None: it is not traced."""

    id: str
    span: Span | None = None


_CURRENT: contextvars.ContextVar[Request | None] = contextvars.ContextVar("tandem_request", default=None)


def new_id() -> str:
    return uuid.uuid4().hex


def valid_id(given: str | None) -> bool:
    """Whether `given` may go into logs and metadata: 1 to 128 visible ASCII characters."""
    return given is not None and _ID.fullmatch(given) is not None


def current() -> Request | None:
    return _CURRENT.get()


def current_span() -> Span | None:
    request = _CURRENT.get()
    return request.span if request else None


def begin(request: Request) -> None:
    """For the rest of this task, and of tasks that it starts."""
    _CURRENT.set(request)


@contextlib.contextmanager
def within(span: Span) -> Iterator[None]:
    """What the block does is part of `span`, which ends with it. Not around a `yield` of an async generator: a block
    begins and ends in one task."""
    before = _CURRENT.get()
    token = _CURRENT.set(Request(before.id if before else new_id(), span))
    error = ""
    try:
        yield
    except asyncio.CancelledError:
        span.note({"cancelled": True})
        raise
    except BaseException as raised:
        error = type(raised).__name__  # what it says may quote the request
        raise
    finally:
        _CURRENT.reset(token)
        span.end(error)


def outgoing(request: Request | None = None) -> Metadata | None:
    """Metadata of a call made for `request`, or for the current one."""
    request = request or _CURRENT.get()
    if request is None:
        return None
    if request.span is None:
        return ((REQUEST_ID, request.id),)
    return ((REQUEST_ID, request.id), *request.span.headers())
