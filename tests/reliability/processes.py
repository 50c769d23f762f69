"""Server processes that are killed with -9 and come back on the same port."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tandem.launch import free_port
from tests.support import REPOSITORY, until

START_SECONDS = 60.0


class Killable:
    """A server process of `arguments` (main.py's). Its name counts its lives: a, a', ..."""

    def __init__(self, folder: Path, name: str, arguments: Sequence[str], seed: int | None = None) -> None:
        self.folder, self.name, self.arguments, self.seed = folder, name, tuple(arguments), seed
        self.port, self.lives = free_port(), 0  # no client's connection may take it between two lives
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def histories(self) -> list[Path]:
        return [self.folder / f"{self.name}.{life}.jsonl" for life in range(1, self.lives + 1)]

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.{self.lives}.log"

    @property
    def probe_file(self) -> Path:
        return self.folder / f"{self.name}.probe"

    @property
    def gate(self) -> Path:
        """While it says "step", every step hangs."""
        return self.folder / f"{self.name}.gate"

    @property
    def hangs(self) -> Path:
        """There once a step hangs."""
        return self.folder / f"{self.name}.gate.hangs"

    async def start(self) -> None:
        """Starts a life, on the port of the one before, and waits until it is ready."""
        self.lives += 1
        life = f"{self.name}.{self.lives}"
        ready = self.folder / f"{life}.ready"
        ours = ["--name", life, "--probe", str(self.probe_file), "--gate", str(self.gate)]
        if self.seed is not None:
            ours += ["--history", str(self.histories[-1]), "--seed", str(self.seed + 1000 * self.lives)]
        theirs = ["--backend", "toy", "--port", str(self.port), "--ready_file", str(ready), *self.arguments]
        command = [sys.executable, "-m", "tests.reliability.server", *ours, "--", *theirs]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, cwd=self.folder, stdout=log, stderr=log, env=os.environ | {"PYTHONPATH": str(REPOSITORY)}
            )
        await until(lambda: ready.exists() or self.process.poll() is not None, START_SECONDS)
        assert ready.exists(), self.log.read_text()

    async def kill(self) -> None:
        """SIGKILL: nothing is said, nothing is closed."""
        assert self.process
        self.process.send_signal(signal.SIGKILL)
        await asyncio.get_running_loop().run_in_executor(None, self.process.wait)

    async def hang(self, seconds: float | None) -> tuple[int | None, float]:
        """Lets a step hang, as soon as one runs, for so long; None: for good, until the process ends.

        Returns the exit status, None if the process runs on, and the most seconds for which the step can have hung:
        since the gate was shut, as a server on a busy machine may be late to say that a step stands there.
        """
        assert self.process
        self.hangs.unlink(missing_ok=True)
        shut = time.monotonic()
        self.gate.write_text("step")
        try:
            await until(lambda: self.hangs.exists() or self._ended)
            if seconds is None:
                await until(lambda: self._ended)
            else:
                with contextlib.suppress(AssertionError):  # it came back in time
                    await until(lambda: self._ended, seconds)
        finally:
            self.gate.unlink(missing_ok=True)
        return self.process.poll(), time.monotonic() - shut

    @property
    def _ended(self) -> bool:
        return self.process is not None and self.process.poll() is not None

    async def probe(self) -> dict[str, int]:
        """What the process holds."""
        assert self.process
        self.probe_file.unlink(missing_ok=True)
        self.process.send_signal(signal.SIGUSR1)
        await until(self.probe_file.exists)
        found: dict[str, int] = json.loads(self.probe_file.read_text())
        return found

    def end(self) -> None:
        if self.process and self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            self.process.wait()
