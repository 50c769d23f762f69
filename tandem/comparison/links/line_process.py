"""Runs a small helper program that takes commands line by line and exits when its stdin is closed."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
GRACE_SECONDS = 2.0


class LineProcess:
    """Runs `module` of this repository without site-packages, so that it starts in about 50 ms.

    Only this process holds the pipe to its stdin, so it cannot outlive us.
    """

    def __init__(self, module: str, *arguments: str) -> None:
        self._name = module
        self._command = [sys.executable, "-E", "-s", "-S", "-m", module, *arguments]
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=ROOT,
            start_new_session=True,  # Ctrl-C on the terminal must reach only the driver
        )

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    async def read(self) -> str:
        """Returns its next line. Raises RuntimeError with the end of its stderr if it has exited."""
        assert self._process is not None and self._process.stdout and self._process.stderr, "not started"
        line = await self._process.stdout.readline()
        if line:
            return line.decode().strip()
        errors = (await self._process.stderr.read()).decode(errors="replace").strip()
        code = await self._process.wait()
        raise RuntimeError(f"link: {self._name} ended with code {code}" + (f": {_last(errors)}" if errors else ""))

    async def ask(self, request: str) -> str:
        """Sends a command and returns what follows `ok`. Raises ValueError with any other answer."""
        assert self._process is not None and self._process.stdin, "not started"
        async with self._turn:
            with contextlib.suppress(ConnectionError):  # it has exited: read() reports how
                self._process.stdin.write(f"{request}\n".encode())
                await self._process.stdin.drain()
            reply = await self.read()
        status, _, rest = reply.partition(" ")
        if status != "ok":
            raise ValueError(f"link: {self._name}, asked to {request}: {rest}")
        return rest

    async def stop(self) -> None:
        """Ends the process, also if the wait is cancelled."""
        if self._process is not None:
            await end(self._process, GRACE_SECONDS)


async def end(process: asyncio.subprocess.Process, grace_s: float) -> None:
    """Closes a process's stdin and kills the process if it does not exit, also if the wait is cancelled."""
    waiting = asyncio.ensure_future(process.wait())
    try:
        if process.stdin:
            process.stdin.close()
        await asyncio.wait((waiting,), timeout=grace_s)
    finally:
        waiting.cancel()
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
    await process.wait()


def _last(text: str) -> str:
    return text.splitlines()[-1]
