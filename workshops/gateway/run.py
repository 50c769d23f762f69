"""Runs smg behind its front, before servers that run already, until a signal comes or smg ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import ssl
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tandem.launch import environment
from tandem.ports import free_port
from tandem.services.health_port import AddressInUse
from tandem.services.http.address import HttpAddress
from tandem.services.http.listener import Listener
from tandem.workshops.gateway.capacity import running_at, slots_of, trouble_of
from tandem.workshops.gateway.config import GatewayConfig
from tandem.workshops.gateway.front import Front

STARTED = time.monotonic()
LOOK_SECONDS = 0.1
STOP_SECONDS = 10.0
"""Time to end besides the drain; what still runs then is killed."""
PART = (sys.executable, "-m", "tandem.workshops.gateway.part", str(os.getpid()))
SMG = (sys.executable, "-c", "import json, sys; sys.argv[1:] = json.load(sys.stdin); import smg.cli; smg.cli.main()")
"""Runs smg with the arguments that it reads, since a command line with API keys could be read by others."""
SETTLE_SECONDS = 5
"""How long smg goes on as before once it is told to end, so that load balancers see that it is not ready."""
FLUSH_SECONDS = 1.0
Process = asyncio.subprocess.Process
Result = TypeVar("Result")


class SmgEnded(Exception):
    """smg has ended, though nobody asked it to."""


class Stopped(Exception):
    """A signal asked for the end."""


class Cut(Exception):
    """A second signal did, while requests ran."""


async def run_gateway(config: GatewayConfig) -> int:
    """Returns the exit code: 0 after SIGTERM or SIGINT, 1 after a second one, or if smg has ended by itself."""
    with _stop_signals() as stopping:
        try:
            listener = Listener(HttpAddress(config.port, config.host), config.tls)
            await _serve(replace(config, port=listener.port), listener, stopping)
        except Stopped:
            return 0
        except AddressInUse as error:
            raise ValueError(str(error)) from None
        except (Cut, SmgEnded) as error:
            print(f"gateway: {error}", file=sys.stderr)
            return 1
    return 0


async def _serve(config: GatewayConfig, listener: Listener, stopping: asyncio.Event) -> None:
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(listener.stop)
        smg: Process | None = None
        try:
            if not await slots_of(config.workers):
                for said in await asyncio.gather(*map(trouble_of, config.workers)):
                    print(f"gateway: waits for a server: {said}", file=sys.stderr, flush=True)
            slots = await _until(partial(slots_of, config.workers), smg, stopping)
            port, metrics_port = free_port(), config.metrics_port or free_port()
            smg = await stack.enter_async_context(_started(config.arguments(slots, port, metrics_port)))
            taken = f"{slots} slots of the workers and a queue of {config.queue} (--queue)"
            await listener.start(Front(port, f"{slots + config.queue} requests are under way: {taken}"))
            model = await _until(partial(asyncio.to_thread, _model_of, config), smg, stopping)
            _announce(config, model)
            await _until(_never, smg, stopping)
        except Stopped:
            await _end(config, smg, stopping)
            raise


@contextlib.asynccontextmanager
async def _started(arguments: Sequence[str]) -> AsyncIterator[Process]:
    """Runs smg while the block runs, and gives it its arguments as JSON. It is killed if this process is."""
    # A new session: Ctrl-C on the terminal reaches this process alone, which ends smg in order.
    process = await asyncio.create_subprocess_exec(
        *PART,
        *SMG,
        stdin=asyncio.subprocess.PIPE,
        stdout=sys.stderr,  # it logs there; this process's own output is the URL
        env={**environment(), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    )
    try:
        assert process.stdin
        process.stdin.write(json.dumps(arguments).encode())
        process.stdin.close()
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        ended = asyncio.ensure_future(process.wait())
        await asyncio.wait({ended}, timeout=STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await ended


async def _end(config: GatewayConfig, smg: Process | None, stopping: asyncio.Event) -> None:
    """Tells smg to end, and says what it waits for. Raises Cut if a signal comes before it has ended."""
    stopping.clear()
    running = await running_at(config.workers) if smg else 0
    waits = [f"{SETTLE_SECONDS} s until load balancers know"] if config.balanced and smg else []
    waits += [f"up to {config.drain_seconds:g} s for {running} running request{'s'[: running > 1]}"] if running else []
    why = f": waits {', then '.join(waits)}; Ctrl-C, or another signal, ends it at once" if waits else ""
    print(f"gateway: stopping{why}", file=sys.stderr, flush=True)
    if smg is None:
        return
    with contextlib.suppress(ProcessLookupError):
        smg.terminate()
    ends: list[asyncio.Future[Any]] = [asyncio.ensure_future(each) for each in (smg.wait(), stopping.wait())]
    if not config.balanced:
        ends.append(asyncio.ensure_future(_nothing_runs(config.workers, FLUSH_SECONDS if running else 0.0)))
    seconds = SETTLE_SECONDS + config.drain_seconds + STOP_SECONDS
    await asyncio.wait(ends, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for each in ends:
        each.cancel()
    with contextlib.suppress(ProcessLookupError):
        smg.kill()
    await smg.wait()
    if stopping.is_set():
        raise Cut("ended at once, by a second signal")


async def _nothing_runs(workers: Sequence[str], flush: float) -> None:
    """Waits until no worker runs a request, and `flush` seconds more, for answers to reach their clients."""
    while await running_at(workers):
        await asyncio.sleep(LOOK_SECONDS)
    await asyncio.sleep(flush)


async def _until(found: Callable[[], Awaitable[Result]], smg: Process | None, stopping: asyncio.Event) -> Result:
    """Waits until something is found, and returns it. Raises Stopped and SmgEnded."""
    while not (result := await found()):
        if smg and (code := smg.returncode) is not None:
            raise SmgEnded(f"smg {f'was killed by signal {-code}' if code < 0 else f'ended with code {code}'}")
        waiting = asyncio.ensure_future(stopping.wait())
        await asyncio.wait({waiting}, timeout=LOOK_SECONDS)
        waiting.cancel()
        if stopping.is_set():
            raise Stopped
    return result


async def _never() -> bool:
    return False


def _model_of(config: GatewayConfig) -> str:
    """Returns a model that the gateway serves; "" until it is ready."""
    trusted = _trusting(config.tls_cert) if config.tls_cert else None
    try:
        urllib.request.urlopen(f"{config.url}/readiness", timeout=5, context=trusted).close()
        with urllib.request.urlopen(f"{config.url}/v1/models", timeout=5, context=trusted) as answer:
            names = [str(model["id"]) for model in json.load(answer)["data"]]
    except OSError:
        return ""
    return names[0] if names else ""


def _trusting(certificate: str) -> ssl.SSLContext:
    """Trusts a server that shows this certificate, whoever signed it and whatever host it names."""
    context = ssl.create_default_context(cafile=certificate)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # its authority is not in the file
    return context


def _announce(config: GatewayConfig, model: str) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    asked = json.dumps({"model": model, "messages": messages, "max_tokens": 40, "temperature": 0})
    secure = f" --cacert {config.tls_cert}" if config.tls_cert else ""
    secure += " -H 'authorization: Bearer YOUR_TOKEN'" if config.accept_tokens else ""
    print(f"OpenAI clients: base URL {config.url}/v1, model {model}", flush=True)
    print(f"curl{secure} {config.url}/v1/chat/completions -H 'content-type: application/json' -d '{asked}'", flush=True)
    if config.ready_file:
        part = Path(f"{config.ready_file}.partial")
        ready = {"host": config.host, "port": config.port, "pid": os.getpid(), "model": model}
        part.write_text(json.dumps({**ready, "startup_seconds": round(time.monotonic() - STARTED, 3)}))
        part.replace(config.ready_file)


@contextlib.contextmanager
def _stop_signals() -> Iterator[asyncio.Event]:
    stopping, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    try:
        yield stopping
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
