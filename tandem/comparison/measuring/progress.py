"""Shows progress on stderr: a bar on a terminal, lines in a log."""

from __future__ import annotations

import time

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from tandem.comparison.measuring.records import Record

QUIET_SECONDS = 15.0  # interval of log lines about starting servers


class Progress:
    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._waiting: dict[str, float] = {}
        self._last_line = time.monotonic()
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        hidden = not self._console.is_terminal
        self._bar = Bar(TextColumn("{task.description}"), *columns, console=self._console, disable=hidden)
        self._bar.add_task("starting", total=None)
        (self._task,) = self._bar.tasks

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def waiting(self, server: str, seconds: float) -> None:
        self._waiting[server] = seconds
        text = "starting " + ", ".join(f"{name} ({s:.0f} s)" for name, s in self._waiting.items())
        self._describe(text)
        if time.monotonic() - self._last_line > QUIET_SECONDS:
            self._line(text)

    def ready(self, server: str, address: str, seconds: float) -> None:
        self._waiting.pop(server, None)
        self._line(f"{server} is ready on {address} after {seconds:.1f} s")

    def say(self, text: str) -> None:
        self._describe(text)
        self._line(text)

    def expect(self, total: int) -> None:
        self._bar.update(self._task.id, total=total)

    def measuring(self, architecture: str, prompt: str) -> None:
        self._describe(f"{architecture} · {prompt}")

    def measured(self, record: Record) -> None:
        self._bar.advance(self._task.id)
        what = f"{record.architecture} · {record.prompt}"
        if record.error:
            self._line(f"{what}: {record.error.code}: {record.error.message}")
        elif record.measurement and not self._console.is_terminal:
            tokens, seconds = record.measurement.output_tokens, record.measurement.end_to_end_latency_s
            done, total = self._task.completed, self._task.total or 0
            self._line(f"[{done:.0f}/{total:.0f}] {what}: {tokens} tokens in {seconds:.2f} s")

    def _describe(self, text: str) -> None:
        self._bar.update(self._task.id, description=escape(text))

    def _line(self, text: str) -> None:
        self._last_line = time.monotonic()
        self._console.print(escape(text), highlight=False, soft_wrap=True)
