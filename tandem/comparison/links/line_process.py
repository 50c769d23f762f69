"""A small program of ours beside the comparison, told what to do line by line. It ends when its stdin does."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
GRACE_SECONDS = 2.0


class LineProcess:
    """`module` of this repository, run without site-packages: a start takes some 50 ms.

    Its stdin is a pipe that only this process holds, so it cannot outlive us, however we end.
    """

    def __init__(self, module: str, *arguments: str, prefix: Sequence[str] = ()) -> None:
        self._name = module
        self._command = [*prefix, sys.executable, "-E", "-s", "-S", "-m", module, *arguments]
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=ROOT,
            start_new_session=True,  # Ctrl-C on the terminal is for the driver alone
        )

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    async def read(self) -> str:
        """Its next line. Raises RuntimeError, with the last of its stderr, where it has ended instead."""
        assert self._process is not None and self._process.stdout and self._process.stderr, "not started"
        line = await self._process.stdout.readline()
        if line:
            return line.decode().strip()
        errors = (await self._process.stderr.read()).decode(errors="replace").strip()
        code = await self._process.wait()
        raise RuntimeError(f"link: {self._name} ended with code {code}" + (f": {_last(errors)}" if errors else ""))

    async def ask(self, request: str) -> str:
        """What it answers after `ok`. Raises ValueError with its own words where it answers otherwise."""
        assert self._process is not None and self._process.stdin, "not started"
        async with self._turn:
            with contextlib.suppress(ConnectionError):  # it has ended: read() says how
                self._process.stdin.write(f"{request}\n".encode())
                await self._process.stdin.drain()
            reply = await self.read()
        status, _, rest = reply.partition(" ")
        if status != "ok":
            raise ValueError(f"link: {self._name}, asked to {request}: {rest}")
        return rest

    async def stop(self) -> None:
        """Ends it; also when the waiting itself is cancelled."""
        if self._process is not None:
            await end(self._process, GRACE_SECONDS)


async def end(process: asyncio.subprocess.Process, grace_s: float) -> None:
    """Ends a process's stdin, then kills it where that is not enough; also when the waiting itself is cancelled."""
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
