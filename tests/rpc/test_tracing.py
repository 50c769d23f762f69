"""Spans: one request is one trace, from client through draft worker to verifier."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tandem.rpc.received_errors import TandemError
from tandem.rpc.request_context import RequestContext, begin, outgoing
from tandem.rpc.tracing import Tracing, open_tracing
from tandem.services.observability.spans import CallSpans
from tandem.speculation.verification_mode import Pipeline
from tandem.v1 import target_verifier_pb2 as pb
from tests import support
from tests.support import (
    Answer,
    answer,
    distributed,
    forbid_imports,
    ids,
    launch,
    raw_stub,
    run,
    server_process,
    target_site,
    until,
)
from tests.support import worker_site as worker
from tests.toy import ToyConfig


class Traced:
    """Spans of every process of a test, in memory."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.of = {name: Tracing(SimpleSpanProcessor(self.exporter), name) for name in ("client", "worker", "target")}

    @contextlib.contextmanager
    def listening(self, name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
        """Servers that begin to listen here trace as `name`."""
        with monkeypatch.context() as patch:
            real, spans = grpc.aio.server, CallSpans(self.of[name])

            def server(interceptors: list[Any], **rest: Any) -> Any:
                interceptors[0].observers = [spans]
                return real(interceptors=interceptors, **rest)

            patch.setattr(support.grpc.aio, "server", server)
            yield

    def begin(self) -> Any:
        span = self.of["client"].start("request", {})
        begin(RequestContext("r1", span))
        return span

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        return self.exporter.get_finished_spans()

    def named(self, name: str, service: str | None = None) -> list[ReadableSpan]:
        return [s for s in self.spans if s.name == name and service in (None, service_of(s))]

    def parent(self, span: ReadableSpan) -> ReadableSpan:
        assert span.parent is not None, f"{span.name} has no parent"
        (found,) = [s for s in self.spans if s.context.span_id == span.parent.span_id]
        return found

    def path(self, span: ReadableSpan) -> list[str]:
        """service:name from the root to the span."""
        above = self.path(self.parent(span)) if span.parent else []
        return [*above, f"{service_of(span)}:{span.name}"]


def service_of(span: ReadableSpan) -> str:
    return str(span.resource.attributes["service.name"])


async def through_a_worker(traced: Traced, monkeypatch: pytest.MonkeyPatch) -> Answer:
    async with contextlib.AsyncExitStack() as stack:
        with traced.listening("target", monkeypatch):
            target = await stack.enter_async_context(target_site())
        with traced.listening("worker", monkeypatch):
            site = await stack.enter_async_context(worker(target.address, "miss=0.3", pipeline=Pipeline.ON))
        client = await stack.enter_async_context(site.client())
        root = traced.begin()
        got = await answer(client.generate, ids(b"abc", 20, ignore_end_of_sequence=True))
        root.end()
    return got


def test_a_distributed_request_is_one_trace_from_client_through_draft_worker_to_verifier(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    traced = Traced()
    stats = run(through_a_worker(traced, monkeypatch)).completion.stats
    requested = [s for s in traced.spans if s.name != "GetModelInfo"]  # the worker asked before there was a request
    assert len({s.context.trace_id for s in requested}) == 1
    to_worker = ["client:request", "client:generate", "worker:Generate"]
    (serving,) = traced.named("Generate", "worker")
    assert traced.path(serving) == to_worker and serving.kind.name == "SERVER"
    assert serving.attributes["tandem.request_id"] == "r1" and serving.attributes["output_tokens"] == 20
    (opening,) = traced.named("OpenSession", "target")
    assert traced.path(opening) == [*to_worker, "worker:open", "target:OpenSession"]
    assert traced.path(traced.named("step", "target")[0])[-2:] == ["target:OpenSession", "target:step"]
    (stream,) = traced.named("VerifyStream", "target")
    assert traced.path(stream) == [*to_worker, "target:VerifyStream"]
    (closing,) = traced.named("CloseSession", "target")
    assert traced.path(closing) == [*to_worker, "target:CloseSession"]
    answered = [s for s in traced.named("Verify", "target") if not s.attributes["stale"]]
    assert len(answered) == stats.rounds
    for span in answered:
        assert traced.path(span) == [*to_worker, "target:VerifyStream", "target:Verify"]
        inside = [s.name for s in traced.spans if s.parent and s.parent.span_id == span.context.span_id]
        assert sorted(inside) == ["queue", "step"]
    rounds = traced.named("round", "worker")
    committed = [s for s in rounds if not s.attributes["stale"]]
    assert len(committed) == stats.rounds and len(rounds) - len(committed) == stats.stale_rounds
    assert sum(s.attributes["k"] for s in committed) == stats.drafted
    assert sum(s.attributes["accepted"] for s in committed) == stats.accepted
    bases = [s.attributes["base_length"] for s in committed]
    assert bases == [s.attributes["base_length"] for s in answered] and bases[0] == 3
    drafts = traced.named("draft", "worker")
    finished = [s for s in drafts if "cancelled" not in s.attributes]
    assert sum(s.attributes["drafted"] for s in finished) >= stats.drafted > 0
    assert {tuple(traced.path(s)) for s in [*rounds, *drafts]} == {
        (*to_worker, "worker:round"),
        (*to_worker, "worker:draft"),
    }


def test_the_steps_of_a_run_are_spans_of_its_target(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = Traced()

    async def ask() -> Answer:
        async with contextlib.AsyncExitStack() as stack:
            with traced.listening("target", monkeypatch):
                target = await stack.enter_async_context(target_site(support.toy(ToyConfig(step_seconds=0.02))))
            there = distributed(target.address, "miss=0.3", pipeline=Pipeline.NEVER_WAITING)
            generator, _ = await stack.enter_async_context(there)
            traced.begin().end()
            return await answer(generator.generate, ids(b"abc", 40, ignore_end_of_sequence=True))

    stats = run(ask()).completion.stats
    steps = traced.named("Verify", "target")
    assert len(steps) >= stats.run_steps == stats.rounds
    assert sum(s.attributes["accepted"] for s in steps) >= stats.accepted > 0
    assert {tuple(traced.path(s)) for s in steps} == {("client:request", "target:VerifyStream", "target:Verify")}
    (opening,), (closing,) = traced.named("OpenSession", "target"), traced.named("CloseSession", "target")
    assert traced.path(opening) == ["client:request", "client:open", "target:OpenSession"]
    assert closing.attributes["run_steps"] == stats.run_steps + stats.wasted_steps


async def test_a_call_that_fails_ends_its_spans_as_errors_that_quote_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = Traced()
    with traced.listening("target", monkeypatch):
        async with target_site() as site, site.client() as client, raw_stub(site.address) as stub:
            traced.begin().end()
            with pytest.raises(TandemError):
                await answer(client.generate, ids([424242424]))
            with pytest.raises(grpc.RpcError):
                await stub.Verify(pb.VerifyRequest(session_id="s", base_length=1), metadata=outgoing())
            await until(lambda: bool(traced.named("Generate") and traced.named("Verify")))  # a server ends them later
    (client,), (server,) = traced.named("generate"), traced.named("Generate")
    assert client.status.description == "INVALID_ARGUMENT"
    assert server.status.description == "INVALID_ARGUMENT: " and server.attributes["rpc.grpc.status_code"] == 3
    (lost,) = traced.named("Verify")
    assert lost.status.description is not None and lost.status.description.startswith("NOT_FOUND: no session")
    assert lost.context.trace_id == server.context.trace_id
    assert not any("424242424" in span.to_json() for span in traced.spans)


def test_tracing_is_off_unless_somebody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(variable, raising=False)
    assert open_tracing(None, "test") is None
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert open_tracing("http://127.0.0.1:4317", "test") is None
    with pytest.raises(ValueError, match="otlp_endpoint: 'collector:4317' is not http://HOST:PORT"):
        open_tracing("collector:4317", "test")


def test_without_the_library_asking_by_flag_is_refused_and_by_variable_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("OTEL_SDK_DISABLED", raising=False)
    forbid_imports(monkeypatch, "opentelemetry")
    with pytest.raises(ValueError, match=r"otlp_endpoint: opentelemetry is not installed; make setup"):
        open_tracing("http://127.0.0.1:4317", "test")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4317")
    assert open_tracing(None, "test") is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]


class _Collector:
    """An OTLP/gRPC collector that keeps the names of what it is sent."""

    def __init__(self) -> None:
        self.names: list[str] = []

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

        async def export(request: Any, context: Any) -> Any:
            for resource in request.resource_spans:
                self.names += [span.name for scope in resource.scope_spans for span in scope.spans]
            return trace_service_pb2.ExportTraceServiceResponse()

        servicer = trace_service_pb2_grpc.TraceServiceServicer()
        servicer.Export = export
        server = grpc.aio.server()
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            await server.stop(None)


def test_processes_send_their_spans_to_the_collector_that_the_flag_names(tmp_path: Path) -> None:
    collector = _Collector()

    async def ask() -> None:
        async with collector.listening() as endpoint:

            def processes() -> None:
                with server_process(tmp_path, "--role", "target", "--otlp_endpoint", endpoint) as server:
                    address = server.wait_ready()
                    asking = ("--role", "client", "--target_host", address, "--prompt", "abc", "--max_new_tokens", "3")
                    asked = launch(tmp_path, *asking, "--otlp_endpoint", endpoint)
                    assert asked.returncode == 0, asked.stderr
                    assert server.stop() == 0

            await asyncio.to_thread(processes)

    run(ask())
    assert {"request", "generate", "Generate", "open", "round"} <= set(collector.names)
