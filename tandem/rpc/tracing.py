"""Trace spans of requests, exported as OTLP; OpenTelemetry (extra `tracing`) is imported only if on."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from tandem.installing import install_command
from tandem.rpc.request_context import Attributes, Metadata, current_span, within
from tandem.speculation.rounds import OutOfStep, RoundsLost
from tandem.speculation.types import Draft, Verdict

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import SpanProcessor

log = logging.getLogger("tandem.tracing")

Inner = TypeVar("Inner")

_ASKED_BY = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


def _missing() -> str:
    return f"opentelemetry is not installed; {install_command('tracing')}"


def open_tracing(endpoint: str | None, name: str) -> Tracing | None:
    """Opens tracing to an OTLP/gRPC collector, by default that of OTEL_* variables; None: off. Raises ValueError."""
    if endpoint is None and not any(os.environ.get(variable) for variable in _ASKED_BY):
        return None
    if endpoint is not None and not endpoint.startswith(("http://", "https://")):
        raise ValueError(f"otlp_endpoint: {endpoint!r} is not http://HOST:PORT or https://HOST:PORT")
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        if endpoint is not None:
            raise ValueError(f"otlp_endpoint: {_missing()}") from None
        log.warning("OTEL_* variables ask for traces, but there are none: %s", _missing())
        return None
    return Tracing(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)), name)


class Tracing:
    def __init__(self, processor: SpanProcessor, name: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        named = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": name}
        self._provider = TracerProvider(resource=Resource.create(named), shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self.tracer = self._provider.get_tracer("tandem")
        self.propagator = TraceContextTextMapPropagator()

    def start(
        self, name: str, attributes: Attributes, kind: str = "internal", metadata: Iterable[tuple[str, Any]] = ()
    ) -> Span:
        """Starts a span; its parent is in the call's `metadata`, if any."""
        from opentelemetry.context import Context

        return Span(self, name, attributes, kind, self.propagator.extract(dict(metadata), Context()))

    def close(self) -> None:
        self._provider.shutdown()


class Span:
    """A started span in the context `parent`; times as time.time()."""

    def __init__(
        self, tracing: Tracing, name: str, about: Attributes, kind: str, parent: Context, started: float | None = None
    ) -> None:
        from opentelemetry.trace import SpanKind

        self._tracing = tracing
        began = _nanoseconds(time.time() if started is None else started)
        self._span = tracing.tracer.start_span(name, parent, SpanKind[kind.upper()], dict(about), start_time=began)

    def child(self, name: str, attributes: Attributes, kind: str = "internal", started: float | None = None) -> Span:
        return Span(self._tracing, name, attributes, kind, self._as_parent(), started)

    def note(self, attributes: Attributes) -> None:
        self._span.set_attributes(dict(attributes))

    def end(self, error: str = "", at: float | None = None) -> None:
        if error:
            from opentelemetry.trace import StatusCode

            self._span.set_status(StatusCode.ERROR, error)
        self._span.end(_nanoseconds(time.time() if at is None else at))

    def headers(self) -> Metadata:
        carrier: dict[str, str] = {}
        self._tracing.propagator.inject(carrier, self._as_parent())
        return tuple(carrier.items())

    def _as_parent(self) -> Context:
        from opentelemetry.context import Context
        from opentelemetry.trace import set_span_in_context

        return set_span_in_context(self._span, Context())


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def traced(inner: Inner, opening: str = "open") -> Inner:
    """Wraps a drafter, verifier or rounds in spans, if the request is traced; `opening`: of `open`, "" for none."""
    span = current_span()
    return cast(Inner, _Traced(inner, span, opening)) if span else inner


_SPANS = {"propose": "draft", "draft_bonus": "guess", "round": "round", "resume": "resume"}
"""Of methods whose first argument is the tokens."""


class _Traced:
    def __init__(self, inner: Any, span: Span, opening: str) -> None:
        self._inner, self._span, self._spans = inner, span, {"open": opening, **_SPANS}

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)
        return partial(self._spanned, self._spans[name], method) if self._spans.get(name) else method

    async def _spanned(
        self, name: str, method: Callable[..., Awaitable[Any]], tokens: Sequence[int], *more: Any, **named: Any
    ) -> Any:
        about: dict[str, Any] = {"base_length": len(tokens)}
        if more:
            about |= {"k": more[0]} if isinstance(more[0], int) else {"cause": type(more[0]).__name__}
        span = (current_span() or self._span).child(name, about)
        with within(span):
            result = await method(tokens, *more, **named)
            span.note(_outcome(result))
        return result

    def send(self, tokens: Sequence[int], draft: Draft) -> asyncio.Future[Verdict]:
        # Rounds overlap, so their spans are children of the request's.
        span = self._span.child("round", {"k": len(draft.token_ids), "base_length": len(tokens)}, "client")
        verdict: asyncio.Future[Verdict] = self._inner.send(tokens, draft)
        verdict.add_done_callback(partial(_answered, span))
        return verdict


def _outcome(result: Any) -> Attributes:
    if isinstance(result, Draft):
        counts: Attributes = {"drafted": len(result.token_ids)}
    elif isinstance(result, Verdict):
        counts = {"accepted": result.accepted, "stale": False}
    elif isinstance(result, tuple):
        draft, verdict = result
        return {"k": len(draft.token_ids), **_outcome(verdict), "draft_seconds": draft.compute_seconds}
    else:
        return {}
    return {**counts, "queue_seconds": result.queue_seconds, "compute_seconds": result.compute_seconds}


def _answered(span: Span, verdict: asyncio.Future[Verdict]) -> None:
    # A cancelled round counts as stale.
    error = None if verdict.cancelled() else verdict.exception()
    stale = verdict.cancelled() or (isinstance(error, RoundsLost) and isinstance(error.cause, OutOfStep))
    if stale or not error:
        span.note({"stale": True} if stale else _outcome(verdict.result()))
    span.end(type(error).__name__ if error and not stale else "")
