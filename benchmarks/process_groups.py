"""Runs programs in process groups, and leaves no process of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path


class ProcessGroups:
    def __init__(self) -> None:
        self._leaders: set[int] = set()

    @contextlib.asynccontextmanager
    async def running(
        self, command: Sequence[str], env: Mapping[str, str], log: Path, grace_s: float = 0.0
    ) -> AsyncIterator[asyncio.subprocess.Process]:
        """Runs a program during the block; then its group ends within `grace_s` or is killed."""
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                env=dict(env),
                start_new_session=True,  # Ctrl-C on the terminal must reach only the benchmark
            )
        self._leaders.add(process.pid)
        try:
            yield process
        finally:
            waiting = asyncio.ensure_future(process.wait())
            try:
                if grace_s:
                    _signal(process.pid, signal.SIGTERM)
                    await asyncio.wait({waiting}, timeout=grace_s)
            finally:
                _signal(process.pid, signal.SIGKILL)  # also after the leader has ended: others may be left
                self._leaders.discard(process.pid)
            await waiting

    def kill(self) -> None:
        """Sends SIGKILL to all, without waiting."""
        for leader in self._leaders:
            _signal(leader, signal.SIGKILL)


def _signal(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)
