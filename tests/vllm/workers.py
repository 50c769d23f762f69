"""DraftWorker processes with the toy model that the engine of these tests has too, and what they say of themselves."""

from __future__ import annotations

import contextlib
import json
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.support import HANG, MAIN, ServerProcess, server_process

WORKER = ("--role", "draft_worker", "--propose_only", "--sequence_length", "160", "--draft_model", "miss=0")


@contextlib.contextmanager
def worker(
    folder: Path, *flags: str, name: str = "worker.json", program: Sequence[str] = (MAIN,), slots: int = 8
) -> Iterator[ServerProcess]:
    ours = (*WORKER, "--batch", str(slots), "--metrics_port", "0")
    with server_process(folder, *ours, *flags, ready_file=name, program=program) as process:
        yield process


def scraped(process: ServerProcess, name: str) -> float:
    """The sum of a worker's metric over its labels."""
    ready = json.loads(process.ready_file.read_text())
    url = f"http://{ready['metrics_host']}:{ready['metrics_port']}/metrics"
    page = urllib.request.urlopen(url, timeout=HANG).read().decode()
    found = [float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(name)]
    assert found, f"no {name} in {page}"
    return sum(found)


def until(condition: Callable[[], bool], seconds: float = HANG) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, "it did not come to be"
        time.sleep(0.02)
