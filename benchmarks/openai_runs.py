"""Puts every tool on every server, one run at a time, and keeps what each run gave."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.load_tools import Run, Shape, Tool, ToolFailed, ToolFigures
from benchmarks.openai_servers import Served
from benchmarks.tool_runs import ToolRunner
from tandem.comparison.measuring.run import rotated

SHARES = (0.5, 0.75, 1.0)
"""Rates of the open loops, as shares of the most requests per second that any closed loop completed."""
MIN_REQUESTS_PER_USER = 2


@dataclass(frozen=True)
class Loads:
    """What each server is put under. `rates` None: SHARES of the saturation that the closed loops show.

    requests: of each run, and at least MIN_REQUESTS_PER_USER for each user. seconds: after which a run ends anyway.
    """

    shapes: tuple[Shape, ...]
    users: tuple[int, ...]
    rates: tuple[float, ...] | None
    requests: int
    seconds: float

    @property
    def count(self) -> int:
        """The number of loads."""
        return len(self.shapes) * (len(self.users) + len(SHARES if self.rates is None else self.rates))


@dataclass(frozen=True)
class Result:
    """One run of one tool on one server. `figures` None: it failed, and `error` says why."""

    server: str
    tool: str
    shape: str
    load: str
    figures: ToolFigures | None
    error: str | None = None


@dataclass
class Outcome:
    """What was measured so far."""

    results: list[Result] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Bench:
    """Runs the tools on servers that are up. Each run has a folder below `folder`."""

    loads: Loads
    outcome: Outcome
    servers: Sequence[Served]
    tools: Sequence[Tool]
    runner: ToolRunner
    tokenizer: str
    folder: Path
    say: Callable[[str], None]
    started: float = field(default_factory=time.monotonic)

    async def run(self) -> None:
        """Measures closed loops, then open ones up to the saturation that they showed. Servers take turns."""
        for shape in self.loads.shapes:
            for turn, users in enumerate(self.loads.users):
                requests = max(self.loads.requests, MIN_REQUESTS_PER_USER * users)
                await self._one_load(shape, turn, requests, users=users)
            for turn, rate in enumerate(self._rates(shape)):
                await self._one_load(shape, turn, self.loads.requests, rate=rate)

    def _rates(self, shape: Shape) -> tuple[float, ...]:
        if self.loads.rates is not None:
            return self.loads.rates
        done = [r.figures.requests_per_minute for r in self.outcome.results if r.shape == shape.name and r.figures]
        most = max((rate for rate in done if rate is not None), default=None)
        if not most:
            self.outcome.remarks.append(f"{shape.name}: no rates, since no closed loop completed a request")
        return tuple(share * most / 60 for share in SHARES) if most else ()

    async def _one_load(
        self, shape: Shape, turn: int, requests: int, users: int | None = None, rate: float | None = None
    ) -> None:
        for tool in self.tools:
            for server in rotated(self.servers, turn):
                run = Run(server.url, server.model, self.tokenizer, shape, requests, self.loads.seconds, users, rate)
                await self._one_run(tool, server, run)

    async def _one_run(self, tool: Tool, server: Served, run: Run) -> None:
        number = len(self.outcome.results)
        folder = self.folder / f"{number + 1:03d}-{tool.name}-{server.name.replace(' ', '-')}"
        head = (server.name, tool.name, run.shape.name, run.load)
        try:
            with server.turn():
                result = Result(*head, await self.runner.measure(tool, run, folder))
        except ToolFailed as error:
            result = Result(*head, None, str(error))
        (folder / "result.json").write_text(json.dumps(asdict(result), indent=1) + "\n")
        self.outcome.results.append(result)
        planned = self.loads.count * len(self.tools) * len(self.servers)
        self.say(f"{number + 1}/{planned}, {time.monotonic() - self.started:.0f} s: {line_of(result)}")


def line_of(result: Result) -> str:
    """Describes one run in a line, for progress."""
    head = f"{result.shape}, {result.load}, {result.tool}, {result.server}"
    if result.figures is None:
        return f"{head}: failed: {result.error}"
    rate = result.figures.output_tokens_per_second
    return f"{head}: {result.figures.completed} requests" + ("" if rate is None else f", {rate:.1f} tokens/s")


async def answering(servers: Sequence[Served], outcome: Outcome) -> list[Served]:
    """Asks every server for a few tokens, which warms it up, and returns those that answer."""
    found = []
    for server in servers:
        try:
            with server.turn():
                await asyncio.to_thread(server.ask)
            found.append(server)
        except (OSError, ValueError) as error:
            outcome.remarks.append(f"{server.name} is left out, it does not answer: {error}")
    return found
