"""Creates trace spans and exports them as OTLP; OpenTelemetry (extra `tracing`) is imported only if on."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tandem.installing import install_command
from tandem.rpc.request_context import Attributes, Metadata

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import SpanProcessor

log = logging.getLogger("tandem.tracing")

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
