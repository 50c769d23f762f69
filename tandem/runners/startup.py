"""Records how long each stage of a startup takes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class Startup:
    """Seconds per stage; repeated stages (two models) add up. `now`: the running stage."""

    def __init__(self, started: float | None = None) -> None:
        self.started = time.monotonic() if started is None else started
        self.seconds: dict[str, float] = {}
        self.notes: list[str] = []
        self.now = "loading"

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Adds the duration of the `with` block to the stage."""
        began, outer, self.now = time.monotonic(), self.now, name
        try:
            yield
        finally:
            self.now = outer
            self.add(name, time.monotonic() - began)

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def note(self, line: str) -> None:
        """Keeps a line for the server's log."""
        self.notes.append(line)

    def total(self) -> float:
        """Seconds since the process started."""
        return time.monotonic() - self.started

    def line(self) -> str:
        """Formats the stages as "importing 3.1 s, loading 0.9 s, ..."; time outside any stage is "other"."""
        total = self.total()
        stages = {**self.seconds, "other": total - sum(self.seconds.values())}
        return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in stages.items() if seconds >= 0.05)
