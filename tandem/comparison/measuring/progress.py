"""Shows progress on stderr: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import time

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from tandem.comparison.measuring.records import Record

LOG_SECONDS = 40.0  # between lines of a log


class Progress:
    def __init__(self, console: Console | None = None, verbose: bool = False) -> None:
        """`verbose`: a line for every server and request."""
        self._console = console or Console(stderr=True)
        self._verbose = verbose
        self._waiting: dict[str, float] = {}
        self._last_line = time.monotonic()
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        hidden = not self._console.is_terminal
        self._bar = Bar(
            TextColumn("{task.description}"), *columns, console=self._console, disable=hidden, transient=True
        )
        self._bar.add_task("starting", total=None)
        (self._task,) = self._bar.tasks

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def waiting(self, server: str, seconds: float) -> None:
        self._waiting[server] = seconds
        self.say("starting " + ", ".join(f"{name} ({s:.0f} s)" for name, s in self._waiting.items()))

    def ready(self, server: str, address: str, seconds: float) -> None:
        self._waiting.pop(server, None)
        if self._verbose:
            self._line(f"{server} is ready on {address} after {seconds:.1f} s")

    def say(self, text: str) -> None:
        self._bar.update(self._task.id, description=escape(text))
        if not self._console.is_terminal and time.monotonic() - self._last_line > LOG_SECONDS:
            self._line(f"{self._done}{text}{self._left}")

    def expect(self, total: int) -> None:
        self._bar.update(self._task.id, total=total)

    def reached(self, done: int, total: int, remark: str) -> None:
        self._bar.update(self._task.id, completed=done, total=total, description="settled")
        if remark:
            self._line(f"{self._done}{remark}")
        self.say("settled")

    def measured(self, record: Record) -> None:
        self._bar.advance(self._task.id)
        what = f"{record.architecture} · {record.prompt}"
        if record.error:
            self._line(f"{what}: {record.error.code}: {record.error.message}")
        elif record.measurement and self._verbose:
            tokens, seconds = record.measurement.output_tokens, record.measurement.end_to_end_latency_s
            self._line(f"{self._done}{what}: {tokens} tokens in {seconds:.2f} s")

    @property
    def _done(self) -> str:
        return f"[{self._task.completed:.0f}/{self._task.total:.0f}] " if self._task.total else ""

    @property
    def _left(self) -> str:
        seconds = self._task.time_remaining
        return f", about {seconds:.0f} s left" if seconds else ""

    def _line(self, text: str) -> None:
        self._last_line = time.monotonic()
        self._console.print(escape(text), highlight=False, soft_wrap=True)
