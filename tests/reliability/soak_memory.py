"""Resident memory of servers over a soak: sampled, written as it comes, fitted, plotted."""

from __future__ import annotations

import asyncio
import json
import os
import textwrap
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

EVERY = 1.0
PER_OPERATION = 16
"""Bytes that an operation may leave behind: fewer than any Python object has, so a leaked one per operation shows."""
ALLOWED = 2 * 2**20
"""Bytes by which a fitted line may rise beside: arenas, caches of channels, what the allocator keeps."""
FEWEST = 60
"""Samples that a line is fitted through: over seconds, arenas that grow look like a leak."""
Processes = Callable[[], Mapping[str, int]]
"""Process ids by server name, as they are now."""


@dataclass(slots=True)
class Memory:
    """Samples of each server: seconds since the start, resident bytes, open files, threads."""

    file: Path | None = None
    samples: dict[str, list[tuple[float, int, int, int]]] = field(default_factory=dict)

    async def sample_forever(self, processes: Processes) -> None:
        """Until cancelled. A server that is being started again is left out."""
        began = time.monotonic()
        while True:
            for name, pid in processes().items():
                if (found := of_process(pid)) is not None:
                    self._add(name, pid, time.monotonic() - began, found)
            await asyncio.sleep(EVERY)

    def _add(self, name: str, pid: int, seconds: float, found: tuple[int, int, int]) -> None:
        self.samples.setdefault(name, []).append((seconds, *found))
        if self.file:
            resident, files, threads = found
            line = {"seconds": round(seconds, 3), "server": name, "pid": pid, "resident_bytes": resident}
            with self.file.open("a", encoding="utf-8") as file:
                print(json.dumps(line | {"files": files, "threads": threads}), file=file, flush=True)

    def rise(self, name: str) -> float:
        """Bytes by which a straight line through the last half of the samples rises."""
        samples = np.array([sample[:2] for sample in self.samples.get(name, [])], dtype=np.float64)
        half = samples[len(samples) // 2 :]
        if len(half) < FEWEST:
            return 0.0
        slope = np.polyfit(half[:, 0], half[:, 1], 1)[0]
        return float(slope * (half[-1, 0] - half[0, 0]))

    def not_flat(self, name: str, operations: float) -> str:
        """What is wrong with a server that answered so many operations meanwhile; empty where nothing is."""
        most, rise = ALLOWED + PER_OPERATION * operations / 2, self.rise(name)
        if rise <= most:
            return ""
        return f"{name}: memory rose by {rise / 2**20:.1f} MiB in the last half; {most / 2**20:.1f} are stated"

    def plot(self, path: Path, title: str, lasting: Collection[str]) -> None:
        """Resident memory by time as a PNG. Of servers that are not `lasting`, which start again, no rise is told."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(10, 5), layout="constrained")
        axes = figure.subplots()
        for name, samples in self.samples.items():
            minutes, resident = [s[0] / 60 for s in samples], [s[1] / 2**20 for s in samples]
            rose = f"{self.rise(name) / 2**20:+.2f} MiB in the last half" if name in lasting else "starts again"
            axes.plot(minutes, resident, label=f"{name}: {rose}")
        axes.set(xlabel="minutes", ylabel="resident MiB")
        axes.set_title(textwrap.fill(title, 110), fontsize=10)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110)


def of_process(pid: int) -> tuple[int, int, int] | None:
    """Resident bytes, open files, threads; None where the process is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        files = len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    if "VmRSS" not in fields:  # a zombie
        return None
    return int(fields["VmRSS"].split()[0]) * 1024, files, int(fields["Threads"])
