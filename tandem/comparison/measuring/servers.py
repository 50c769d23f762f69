"""Starts server processes, waits until they are ready, and stops them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.launch import environment

TAIL_LINES = 15
POLL_SECONDS = 0.05


class ServerFailed(RuntimeError):
    """A server process failed; names it, the failure and its log."""

    def __init__(self, name: str, what: str, log: Path, returncode: int | None) -> None:
        super().__init__(describe_failure(name, what, log))
        self.name = name
        self.returncode = returncode


def describe_failure(name: str, what: str, log: Path) -> str:
    tail = log_tail(log)
    if not tail:
        return f"server {name} {what} (it wrote nothing to {log})"
    if len(tail) == 1:
        return f"server {name} {what}: {tail[0]}"
    return "\n".join([f"server {name} {what} (log: {log})", *(f"  {line}" for line in tail)])


def log_tail(log: Path, lines: int = TAIL_LINES) -> list[str]:
    text = log.read_text(errors="replace") if log.exists() else ""
    return [line for line in text.splitlines() if line.strip()][-lines:]


@dataclass(frozen=True)
class Server:
    name: str
    host: str
    port: int
    log: Path
    startup_seconds: float
    process: asyncio.subprocess.Process

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"


class Fleet:
    """The server processes of a comparison, stopped on exit; `concurrency` start at a time."""

    def __init__(
        self,
        log_dir: Path,
        startup_timeout_s: float = 600.0,
        grace_s: float = 10.0,
        concurrency: int = max(1, (os.cpu_count() or 1) // 4),  # two at once on 2 cores take 4 times as long
        on_wait: Callable[[str, float], None] = lambda name, seconds: None,
        on_ready: Callable[[str, str, float], None] = lambda name, address, seconds: None,
    ) -> None:
        self._log_dir = log_dir
        self._startup_timeout_s = startup_timeout_s
        self._grace_s = grace_s
        self._on_wait, self._on_ready = on_wait, on_ready
        self._starting = asyncio.Semaphore(concurrency)
        self._processes: list[asyncio.subprocess.Process] = []
        self._ready: list[Server] = []

    async def __aenter__(self) -> Fleet:
        self._log_dir.mkdir(parents=True, exist_ok=True)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop()

    async def start(self, name: str, command: Sequence[str]) -> Server:
        """Runs `command` and returns when the server has written its --ready_file."""
        log, ready_file = self._log_dir / f"{name}.log", self._log_dir / f"{name}.ready.json"
        async with self._starting:
            ready_file.unlink(missing_ok=True)
            with log.open("wb") as output:
                # A new session: Ctrl-C on the terminal reaches only the driver, which stops its servers in order.
                process = await asyncio.create_subprocess_exec(
                    *command,
                    "--ready_file",
                    str(ready_file),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=asyncio.subprocess.STDOUT,
                    env={**environment(), "PYTHONUNBUFFERED": "1"},
                    start_new_session=True,
                )
            self._processes.append(process)
            server = await self._until_ready(name, process, log, ready_file)
        self._ready.append(server)
        self._on_ready(server.name, server.address, server.startup_seconds)
        return server

    async def _until_ready(self, name: str, process: asyncio.subprocess.Process, log: Path, ready_file: Path) -> Server:
        started = time.monotonic()
        while True:
            if process.returncode is not None:
                raise ServerFailed(name, f"{_ending(process.returncode)} while starting", log, process.returncode)
            if ready_file.exists():
                ready = json.loads(ready_file.read_text())
                seconds = float(ready.get("startup_seconds", 0.0))
                return Server(name, str(ready["host"]), int(ready["port"]), log, seconds, process)
            waited = time.monotonic() - started
            if waited > self._startup_timeout_s:
                raise ServerFailed(name, f"was not ready after {self._startup_timeout_s:g} s", log, None)
            self._on_wait(name, waited)
            await asyncio.sleep(POLL_SECONDS)

    async def death(self) -> str:
        """Waits until a ready server exits; returns its name, exit code and log."""
        ends = {asyncio.ensure_future(server.process.wait()): server for server in self._ready}
        try:
            await (asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED) if ends else asyncio.Event().wait())
            server = next(server for end, server in ends.items() if end.done())
        finally:
            for end in ends:
                end.cancel()
        return describe_failure(server.name, _ending(server.process.returncode), server.log)

    def kill(self) -> None:
        for process in self._processes:
            _kill_group(process)

    async def stop(self) -> None:
        """Sends SIGTERM, then SIGKILL after the grace period or if cancelled."""
        running = [process for process in self._processes if process.returncode is None]
        for process in running:
            with contextlib.suppress(ProcessLookupError):  # it exited in the meantime
                process.terminate()
        try:
            if running:
                await asyncio.wait([asyncio.ensure_future(p.wait()) for p in running], timeout=self._grace_s)
        finally:
            for process in running:
                _kill_group(process)
        for process in running:
            await process.wait()


def _kill_group(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _ending(returncode: int | None) -> str:
    if returncode is not None and returncode < 0:
        return f"was killed by signal {-returncode}"
    return f"exited with code {returncode}"
