"""Wires up metrics, request log and traces; disabled parts are not imported."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Mapping, Sized
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeVar

import tandem
from tandem.engine.batcher import Batcher
from tandem.engine.engine import Engine
from tandem.engine.generator import Generator
from tandem.installing import check_installed
from tandem.rpc.tracing import Tracing, open_tracing, traced
from tandem.runners.startup import Startup
from tandem.services.calls import CallObserver
from tandem.services.generation import Watch
from tandem.services.observability.request_log import RequestLog
from tandem.services.observability.spans import CallSpans
from tandem.services.sessions.table import SessionTable
from tandem.services.shutdown import Lifecycle, bounded, bounded_call
from tandem.speculation.fallible import DrafterHealth
from tandem.speculation.types import ModelInfo

if TYPE_CHECKING:
    from tandem.services.http.listener import MetricsPort
    from tandem.services.observability.metrics import Metrics

log = logging.getLogger("tandem.server")

Result = TypeVar("Result")


class Observability:
    """One server's metrics, log and traces. `http`: an HTTP port shows metrics. Raises ValueError."""

    def __init__(
        self, role: str, host: str, port: int | None, otlp_endpoint: str | None = None, http: bool = False
    ) -> None:
        self._role = role
        self._counts = port is not None or (http and find_spec("prometheus_client") is not None)
        self.metrics: Metrics | None = None  # None: off, or before `loaded`
        self._port = None if port is None else _metrics_port(host, port)
        self._scraping = ThreadPoolExecutor(1, "metrics page")  # so that a scrape delays no round
        self._tracing: Tracing | None = open_tracing(otlp_endpoint, f"tandem-{role}")
        self._log = RequestLog(role)
        self.observers: list[CallObserver] = [CallSpans(self._tracing)] if self._tracing else []
        self.observers.append(self._log)

    def loaded(self, info: ModelInfo) -> None:
        if self._counts:
            from tandem.services.observability.metrics import Metrics

            name = info.model_name or info.draft_name
            about = ("weights_revision", "draft_name", "dtype", "device", "backend")
            build = {"version": tandem.__version__, **{each: getattr(info, each) for each in about}}
            self.metrics = Metrics(self._role, name, info.max_speculation_length, build, info.rehearsals)
            self.observers.append(self.metrics)
            if self._port:
                self._port.page = self.page

    async def page(self, accept: str) -> tuple[bytes, str]:
        from prometheus_client.exposition import choose_encoder

        assert self.metrics
        encode, content_type = choose_encoder(accept)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._scraping, encode, self.metrics.registry), content_type

    @property
    def watch(self) -> Watch | None:
        return self.metrics.generation.request if self.metrics else None

    def traced(self, generator: Generator) -> Generator:
        if self._tracing is None:
            return generator
        make = generator.make_rounds
        return replace(generator, make_rounds=lambda *asked: traced(make(*asked)))

    def watch_parts(
        self,
        lifecycle: Lifecycle,
        batcher: Batcher,
        engines: Mapping[str, Engine],
        sessions: Mapping[str, Sized] | None = None,
        drafter: DrafterHealth | None = None,
    ) -> None:
        """Observes finished engines of "target", "target_apart", "draft" and sessions that "verify" or "propose"."""
        sessions = sessions or {}
        if isinstance(verifying := sessions.get("verify"), SessionTable):
            verifying.on_end.append(self._log.session_ended)
        if not self.metrics:
            return
        states = self.metrics.states
        self.metrics.watch_steps(batcher)
        states.watch_requests(lifecycle, list(sessions.values()), [each.slots for each in engines.values()])
        states.watch_engines(engines)
        for kind, table in sessions.items():
            states.watch("sessions", table, {"kind": kind})
        if drafter:
            states.watch("drafter", drafter)

    def ready(self, startup: Startup) -> dict[str, object]:
        """Records start-up times; returns entries for the ready file."""
        if self.metrics:
            self.metrics.started({**startup.seconds, "total": startup.total()})
        if not self._port:
            return {}
        log.info("metrics at http://%s:%d/metrics", self._port.host, self._port.port)
        return {"metrics_host": self._port.host, "metrics_port": self._port.port}

    async def during(self, serving: Awaitable[Result]) -> Result:
        if self._port:
            await self._port.serve(self._port)
        try:
            return await serving
        finally:
            if self._port:
                await bounded(self._port.stop(), "the metrics port")
            if self._tracing:
                await bounded_call(self._tracing.close, "sending the last traces")


def _metrics_port(host: str, port: int) -> MetricsPort:
    check_installed("metrics_port", "metrics", "prometheus_client", "uvicorn", "h11")
    from tandem.services.http.listener import MetricsPort

    return MetricsPort(host, port)
