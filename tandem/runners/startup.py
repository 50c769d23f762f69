"""Where the seconds until a server is ready go."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class Startup:
    """Records stages by name; what comes twice (two models) adds up. Passed along, one per process start."""

    def __init__(self, started: float | None = None) -> None:
        self.started = time.monotonic() if started is None else started
        self.seconds: dict[str, float] = {}
        self.notes: list[str] = []

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.add(name, time.monotonic() - began)

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def note(self, line: str) -> None:
        self.notes.append(line)

    def total(self) -> float:
        return time.monotonic() - self.started

    def line(self) -> str:
        """importing 3.1 s, loading 0.9 s, ...; what no stage covers is "other"."""
        total = self.total()
        stages = {**self.seconds, "other": total - sum(self.seconds.values())}
        return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in stages.items() if seconds >= 0.05)
