"""How long a client waits for a verifier that hangs before it goes on at another: real server processes, two listed.

    python -m tests.reliability.hangs --runs 5

The first verifier is stopped (SIGSTOP: nothing answers) or its steps hang (SIGUSR2: everything but the model answers),
before a request opens its session or in the middle of it, with and without a deadline.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import logging
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.cli import main as launcher
from tandem.engine.generator import Generator
from tandem.rpc.verifier_client import VerifierClient
from tandem.speculation.types import Chunk, SamplingParams
from tandem.speculation.verification_mode import Pipeline
from tests.support import REPOSITORY, distributed, ids, oracle, until
from tests.toy import ToyRunner

PROMPT = list(b"a verifier that hangs")
TOKENS, BEFORE = 60, 20
DEADLINES = (None, 9.0)
ALLOWED = 5.0  # seconds without a deadline; with one, a third of it


@dataclass(frozen=True, slots=True)
class Case:
    """What happens to the first verifier, when, and what the request allows."""

    fault: str
    place: str
    deadline: float | None
    pipeline: Pipeline

    @property
    def allowed(self) -> float:
        return ALLOWED if self.deadline is None else self.deadline / 3

    def __str__(self) -> str:
        limit = "no deadline" if self.deadline is None else f"{self.deadline:g} s"
        return f"{self.fault}, {self.place}, {limit}, pipeline {self.pipeline.value}"


CASES = [
    Case(*each)
    for each in itertools.product(
        ("stopped", "step hangs"),
        ("at opening", "in a request"),
        DEADLINES,
        (Pipeline.OFF, Pipeline.AUTO, Pipeline.NEVER_WAITING),
    )
]


class Server:
    """A toy TargetVerifier in a process of its own that can be made to hang, and to go on."""

    def __init__(self, folder: Path, name: str) -> None:
        self.ready = folder / f"{name}.ready"
        arguments = ["--role", "target", "--backend", "toy", "--model", "step=0.004", "--sequence_length", "160"]
        command = [sys.executable, "-m", "tests.reliability.hangs", "--", *arguments, "--port", "0"]
        with (folder / f"{name}.log").open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--ready_file", str(self.ready)],
                cwd=folder,
                stdout=log,
                stderr=log,
                env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
            )

    async def address(self) -> str:
        await until(self.ready.exists, 60.0)
        return f"127.0.0.1:{json.loads(self.ready.read_text())['port']}"

    def hang(self, fault: str) -> None:
        self.process.send_signal(signal.SIGSTOP if fault == "stopped" else signal.SIGUSR2)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def serve(argv: Sequence[str]) -> int:
    """main.py with a toy runner whose steps hang from SIGUSR2 on."""
    going = threading.Event()
    going.set()
    work = ToyRunner.work

    def hanging(runner: ToyRunner) -> None:
        going.wait()
        work(runner)

    ToyRunner.work = hanging  # type: ignore[method-assign]
    signal.signal(signal.SIGUSR2, lambda *_: going.clear())
    return launcher.main(list(argv))


@contextlib.asynccontextmanager
async def two_servers() -> AsyncIterator[tuple[Server, str, str]]:
    """The first of two, which may be made to hang, and both addresses."""
    with tempfile.TemporaryDirectory() as folder:
        servers = [Server(Path(folder), name) for name in ("first", "second")]
        try:
            first, second = await asyncio.gather(*(server.address() for server in servers))
            yield servers[0], first, second
        finally:
            for server in servers:
                server.end()


async def seconds_to_go_on(case: Case) -> float:
    """From the fault (or the request, where it came before that) to the next tokens, which must be right."""
    async with (
        two_servers() as (server, first, second),
        distributed(f"{first},{second}", "salt=0,miss=0.3", pipeline=case.pipeline) as (generator, client),
    ):
        await tokens_of(generator, None, None)  # both ends are warm, and waits are learned
        client.pool.current = first
        hang = lambda: server.hang(case.fault)  # noqa: E731
        if case.place == "at opening":
            hang()
            found, tokens = await tokens_of(generator, case.deadline, None)
        else:
            found, tokens = await tokens_of(generator, case.deadline, hang)
        _check(client, second, tokens)
        return found


async def tokens_of(generator: Generator, deadline: float | None, hang: Any) -> tuple[float, tuple[int, ...]]:
    """The longest wait for tokens from the first on (without `hang`), or from when it hung on; and all tokens."""
    began = last = time.monotonic()
    longest, seen = 0.0, list[int]()
    request = ids(PROMPT, TOKENS, ignore_end_of_sequence=True, deadline=deadline and began + deadline)
    async with contextlib.aclosing(generator.generate(request)) as events:
        async for event in events:
            if not isinstance(event, Chunk):
                continue
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
            seen += event.token_ids
            if hang and len(seen) >= BEFORE:
                hang()
                hang, longest, last = None, 0.0, time.monotonic()
    return longest, tuple(seen)


def _check(client: VerifierClient, second: str, tokens: tuple[int, ...]) -> None:
    assert tokens == oracle(PROMPT, SamplingParams(), TOKENS, past_the_end=True), "wrong tokens"
    assert client.address == second, "the request did not go on at the second verifier"


async def measure(cases: Sequence[Case], runs: int, at_once: int = 1) -> dict[Case, list[float]]:
    """Seconds of each run of each case, of which `at_once` run beside each other."""
    gate = asyncio.Semaphore(at_once)

    async def one(case: Case) -> float:
        async with gate:
            return await seconds_to_go_on(case)

    found = await asyncio.gather(*(one(case) for case in cases for _ in range(runs)))
    return {case: list(found[i * runs : (i + 1) * runs]) for i, case in enumerate(cases)}


def main(argv: Sequence[str]) -> int:
    if argv and argv[0] == "--":
        return serve(argv[1:])
    parser = argparse.ArgumentParser(description="Measures how long clients wait for a verifier that hangs.")
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args(argv)
    logging.disable(logging.WARNING)
    missed = 0
    for case in CASES:
        found = asyncio.run(measure([case], arguments.runs))[case]
        missed += sum(seconds > case.allowed for seconds in found)
        middle = statistics.median(found)
        print(f"{case}: median {middle:.2f} s, longest {max(found):.2f} s, allowed {case.allowed:.1f} s", flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
