"""Runs a server process: bind, load, warm up, serve, drain, stop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from tandem.engine.step_watch import StepWatch
from tandem.installing import check_installed
from tandem.rpc.endpoint_pool import bracketed
from tandem.runners.startup import Startup
from tandem.services.binding import bind
from tandem.services.calls import CallObserver
from tandem.services.health import NOT_SERVING, SERVING, HealthService
from tandem.services.http.service import HttpService
from tandem.services.security.access import Security
from tandem.services.security.call_limits import TransportInterceptor
from tandem.services.shutdown import STOP_SECONDS, Lifecycle, ShutdownDeadline, bounded

if TYPE_CHECKING:  # uvicorn need not be installed
    from tandem.services.http.app import HttpPort

log = logging.getLogger("tandem.server")
Register = Callable[[grpc.aio.Server], None]
Work = Callable[[], Awaitable[None]]
FIRST_SECONDS, EVERY_SECONDS = 1.5, 4.0  # of lines that name the stage of a start

_OPTIONS = (
    ("grpc.so_reuseport", 0),  # a port that is taken is an error, not a second server
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 30_000),
)
_PROBE_OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", 4096),
    ("grpc.max_concurrent_streams", 100),
)


@dataclass(frozen=True, slots=True)
class HttpAddress:
    """`port` 0: a free one. `allowed_hosts`: Host headers accepted without a key. Raises ValueError."""

    port: int
    host: str
    allowed_hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"http_port: {self.port} is outside 0 to 65535")
        check_installed("http_port", "http", "uvicorn", "h11")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """`port` 0: a free one. `health_port`: health checks only. `ending` kills a process that does not end in time."""

    host: str
    port: int
    ready_file: str | None = None
    drain_seconds: float
    startup: Startup
    security: Security
    health_port: int | None = None
    http: HttpAddress | None = None
    ending: ShutdownDeadline

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port: {self.port} is outside 0 to 65535")
        if self.health_port is not None and not 1 <= self.health_port <= 65535:
            raise ValueError(f"health_port: {self.health_port} is outside 1 to 65535")
        self.security.check_host(self.host)
        if self.http is not None:
            self.security.check_host(self.http.host, "http_host")


@dataclass(slots=True)
class HostedService:
    """A role's service and background tasks. `ready()` returns entries for the ready file."""

    service: str
    register: Register
    http: HttpService | None = None
    background: Mapping[str, Work] = field(default_factory=dict)
    busy: Callable[[], int] = lambda: 0
    ready: Callable[[], Mapping[str, object]] = dict
    close: Callable[[], Awaitable[None]] | None = None
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the device has failed: its state is unreliable, so the process ends."""
    watch: StepWatch | None = None  # detects hung steps

    def start(self, lifecycle: Lifecycle, health: HealthService, *names: str) -> list[asyncio.Task[None]]:
        """Starts background tasks, whose end ends the server; `names` are not serving while a step hangs."""

        def changed(fine: bool) -> None:
            health.set(SERVING if fine and lifecycle.accepting else NOT_SERVING, *names)

        works = dict(self.background)
        if self.watch:
            self.watch.changed = changed
            works["the watch over steps"] = self.watch.forever
        return [asyncio.create_task(_kept(name, work), name=name) for name, work in works.items()]


async def _kept(name: str, work: Work) -> None:
    error: Exception = RuntimeError("it returned")
    try:
        await work()
    except Exception as raised:
        error = raised
    log.critical("%s ended (%s): the server stops", name, error, exc_info=error)


async def serve(
    config: ServeConfig,
    lifecycle: Lifecycle,
    build: Callable[[], Awaitable[HostedService]],
    observers: Sequence[CallObserver] = (),
) -> int:
    """Binds, loads, serves until a signal, drains; returns the exit code: 1 if the device or a task was lost."""
    ending = config.ending
    server = config.security.server(observers, options=_OPTIONS)
    port = bind("port", config.host, config.port, partial(config.security.add_port, server))
    probes = _probe_server(config)
    http = bound_http_port(config, observers, port)
    ending.begin()
    stopping = _stop_signals(ending, config.drain_seconds)
    building = asyncio.ensure_future(build())
    naming = asyncio.create_task(name_stages(config.startup))
    await asyncio.wait({building, asyncio.create_task(stopping.wait())}, return_when=asyncio.FIRST_COMPLETED)
    naming.cancel()
    if not building.done():
        ending.within(STOP_SECONDS, "the model is still loading")
        return 0
    hosted = building.result()
    gc.collect()
    gc.freeze()  # full collections of what is loaded paused requests for 0.2 s
    names = ("", f"tandem.v1.{hosted.service}")
    with config.startup.stage("listening"):
        health = await _listen(server, hosted, names)
        health_pb2_grpc.add_HealthServicer_to_server(health, probes)
        await probes.start()
        if http and hosted.http:
            await http.start(hosted.http, health)
    tasks = hosted.start(lifecycle, health, *names)
    _announce(config, port, hosted, http)
    await asyncio.wait(
        [*tasks, *(asyncio.create_task(event.wait()) for event in (stopping, hosted.lost))],
        return_when=asyncio.FIRST_COMPLETED,
    )
    failed = hosted.lost.is_set() or any(task.done() for task in tasks)
    lifecycle.accepting = False
    health.set(NOT_SERVING, *names)
    ending.within(config.drain_seconds + STOP_SECONDS, f"it did not stop after {config.drain_seconds:g} s of draining")
    await _drain(lifecycle, hosted, config.drain_seconds)
    await _end(server, probes, tasks, hosted, http)
    return int(failed or hosted.lost.is_set())


async def name_stages(startup: Startup) -> None:
    """Logs the stage of the start-up now and then; on a terminal alone, since the end's line has them all."""
    wait = max(0.0, FIRST_SECONDS - startup.total())
    while sys.stderr.isatty():
        await asyncio.sleep(wait)
        log.info("starting: %s, %.0f s so far", startup.now, startup.total())
        wait = EVERY_SECONDS


async def _end(
    server: grpc.aio.Server,
    probes: grpc.aio.Server,
    tasks: Sequence[asyncio.Task[None]],
    hosted: HostedService,
    http: HttpPort | None,
) -> None:
    # Parts that do not end in time are abandoned.
    await bounded(server.stop(grace=0.5), "the server's port")
    if http:
        await bounded(http.stop(), "the HTTP port")
    await bounded(probes.stop(grace=0), "the health port")
    for task in tasks:
        task.cancel()
    await bounded(asyncio.gather(*tasks, return_exceptions=True), "background tasks")
    if hosted.close:
        await bounded(hosted.close(), "freeing the models", STOP_SECONDS)
    log.info("stopped")


def _probe_server(config: ServeConfig) -> grpc.aio.Server:
    """Health checks alone, in clear text: Kubernetes' probes support neither TLS nor tokens. Raises CannotListen."""
    server = grpc.aio.server(interceptors=[TransportInterceptor(config.security.limits)], options=_PROBE_OPTIONS)
    if config.health_port is not None:
        bind("health_port", config.host, config.health_port, server.add_insecure_port)
    return server


async def _listen(server: grpc.aio.Server, hosted: HostedService, names: Sequence[str]) -> HealthService:
    health = HealthService()
    hosted.register(server)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    listed = (*filter(None, names), health_pb2.DESCRIPTOR.services_by_name["Health"].full_name)
    reflection.enable_server_reflection((*listed, reflection.SERVICE_NAME), server)
    await server.start()
    health.set(SERVING, *names)
    return health


def _stop_signals(ending: ShutdownDeadline, drain_seconds: float) -> asyncio.Event:
    # The first signal starts the shutdown's time limit, even with a blocked loop; the second kills.
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        stopping.set()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)  # the loop leaves KeyboardInterrupt to SIGINT, which uvicorn catches

    def at_once(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        ending.within(
            drain_seconds + STOP_SECONDS, f"it did not stop on a signal after {drain_seconds:g} s of draining"
        )

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
        signal.signal(number, at_once)  # replaces the loop's no-op handler; the loop is still woken by its wakeup fd
    return stopping


def bound_http_port(config: ServeConfig, observers: Sequence[CallObserver], grpc_port: int = 0) -> HttpPort | None:
    if config.http is None:
        return None
    from tandem.services.http.app import HttpPort

    return HttpPort(config.http, config.security, observers, grpc_port)


def _announce(config: ServeConfig, port: int, hosted: HostedService, http: HttpPort | None) -> None:
    seconds = config.startup.total()
    for note in config.startup.notes:
        log.info("start-up: %s", note)
    log.info("start-up: %s", config.startup.line())
    config.security.log_access(config.host)
    host = bracketed(config.host)
    log.info("%s is ready on %s:%d after %.1f s", hosted.service, host, port, seconds)
    more = hosted.ready()
    if config.http and http and hosted.http:
        more = {**more, "http_host": bracketed(config.http.host), "http_port": http.port, "model": hosted.http.model}
        _invite(config.security, http.url, hosted.http.model)
    if config.ready_file:
        ready: dict[str, object] = {"host": host, "port": port, "pid": os.getpid(), "startup_seconds": seconds}
        ready["startup"] = {name: round(taken, 3) for name, taken in config.startup.seconds.items()}
        ready |= more
        partial = Path(f"{config.ready_file}.partial")
        partial.write_text(json.dumps(ready))
        partial.replace(config.ready_file)


def _invite(security: Security, url: str, model: str) -> None:
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 40})
    secure = f" --cacert {security.tls.cert}" if security.tls else ""
    secure += " -H 'authorization: Bearer YOUR_TOKEN'" if security.tokens else ""
    print(f"OpenAI clients: base URL {url}/v1, model {model}", flush=True)
    print(f"curl{secure} {url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'", flush=True)


async def _drain(lifecycle: Lifecycle, hosted: HostedService, seconds: float) -> None:
    # Sessions of a lost device cannot finish.
    if hosted.lost.is_set():
        log.error("the model's device is lost, and all sessions with it; stopping: restart the server")
    else:
        running = lifecycle.running + hosted.busy()
        waits = (
            f" waits up to {seconds:g} s for what runs ({running}); a second signal ends it at once" if running else ""
        )
        log.info("stopping:%s", waits or " nothing runs")
    with contextlib.suppress(asyncio.CancelledError):
        await lifecycle.drain(seconds, lambda: 0 if hosted.lost.is_set() else hosted.busy())
