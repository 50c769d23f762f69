"""Compares replays of recorded links with a queue computed offline: `python -m benchmarks.trace_agreement UP DOWN ...`.

Sends a seeded schedule of small and large messages over sockets, up one trace and then the next, and compares how long
each took with what the offline queue says. Without files, traces are generated.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.arguments import Parser, positive
from benchmarks.keeping import kept
from tandem.comparison.links.impairments import Impairments
from tandem.comparison.links.line_process import LineProcess
from tandem.comparison.links.settings import SEGMENT_BYTES
from tandem.comparison.links.trace import read_trace
from tandem.comparison.measuring.environment import these_versions, this_machine
from tests.comparison.reference_queue import departures, generated

ALLOWED = 0.02
RTT_MS = 40.0
SIZES = (64, 64, 64, 300, 1448, 30_000)


@dataclass(frozen=True, slots=True)
class Agreement:
    """Mean and 95th percentile of the seconds that messages took, measured and by the offline queue."""

    trace: str
    messages: int
    mean_s: float
    expected_mean_s: float
    p95_s: float
    expected_p95_s: float

    @property
    def off(self) -> float:
        return self.mean_s / self.expected_mean_s - 1

    @property
    def off_p95(self) -> float:
        return self.p95_s / self.expected_p95_s - 1


def p95(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=20)[-1]


def schedule(seconds: float, noise: random.Random) -> list[tuple[float, int]]:
    """When messages are sent, and their sizes."""
    sent, now = [], 0.0
    while now < seconds:
        now += noise.expovariate(1 / 0.03)
        sent.append((now, noise.choice(SIZES)))
    return sent


def exchanged(near: socket.socket, far: socket.socket, sent: Sequence[tuple[float, int]], began: float):  # type: ignore[no-untyped-def]
    """Sends by the schedule; returns when each message was sent and when it had arrived, in seconds since `began`."""
    left: list[float] = []
    came: list[float] = []

    def receive() -> None:
        for _, size in sent:
            missing = size
            while missing:
                missing -= len(far.recv(missing))
            came.append(time.monotonic() - began)

    reader = threading.Thread(target=receive)
    reader.start()
    for at, size in sent:
        time.sleep(max(0.0, began + at - time.monotonic()))
        left.append(time.monotonic() - began)
        near.sendall(bytes(size))
    reader.join()
    return left, came


def offline(times: Sequence[int], sent: Sequence[tuple[float, int]]) -> list[float]:
    """When the last segment of each message leaves."""
    segments = [(at, min(SEGMENT_BYTES, size - start)) for at, size in sent for start in range(0, size, SEGMENT_BYTES)]
    counts = itertools.accumulate(-(-size // SEGMENT_BYTES) for _, size in sent)
    gone = departures(times, segments)
    return [gone[count - 1] for count in counts]


async def agreement(path: str, seconds: float) -> Agreement:
    """Replays one trace, up the link."""
    proxy = LineProcess("tandem.comparison.links.delay_proxy")
    await proxy.start()
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = await proxy.ask(f"listen 127.0.0.1:{listener.getsockname()[1]}")
            near = await asyncio.to_thread(socket.create_connection, ("127.0.0.1", int(port)))
            far, _ = listener.accept()
        near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with near, far:
            traces = json.dumps(asdict(Impairments(trace_up=path, trace_down=path)))
            began = float(await proxy.ask(f"set {RTT_MS} none {traces}"))
            sent = schedule(seconds, random.Random(1))
            left, came = await asyncio.to_thread(exchanged, near, far, sent, began)
    finally:
        await proxy.stop()
    sizes = [size for _, size in sent]
    gone = offline(read_trace(path), list(zip(left, sizes, strict=True)))
    took = [after - before for before, after in zip(left, came, strict=True)]
    expected = [after + RTT_MS / 2000 - before for before, after in zip(left, gone, strict=True)]
    means = statistics.fmean(took), statistics.fmean(expected)
    return Agreement(Path(path).name, len(sent), *means, p95(took), p95(expected))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(prog="trace_agreement", description=__doc__, allow_abbrev=False)
    parser.add_argument("traces", nargs="*", help="files in Mahimahi's format (default: four that are generated)")
    parser.flag("--seconds", type=positive, default=10, metavar="N", help="for each trace (default: 10)")
    parser.flag("--output", type=Path, default=Path("results/trace_agreement.json"), help="(default: %(default)s)")
    args = parser.parse_args(argv)
    try:
        for path in args.traces:
            read_trace(path)
    except ValueError as error:
        parser.error(str(error))
    return args


def made_up(folder: str) -> list[str]:
    """Writes four generated traces; returns their paths."""
    paths = []
    for number, mbps in enumerate((1, 2, 6, 12)):
        path = Path(folder, f"generated-{mbps}")
        path.write_text("".join(f"{at}\n" for at in generated(random.Random(number), seconds=30, mbps=mbps)))
        paths.append(str(path))
    return paths


async def measure_all(paths: Sequence[str], seconds: float, found: list[Agreement]) -> None:
    for path in paths:
        print(Path(path).name, file=sys.stderr, flush=True)
        found.append(await agreement(path, seconds))


def table_of(found: Sequence[Agreement]) -> Table:
    table = Table(title="Replays against the queue computed offline", title_justify="left")
    table.add_column("trace")
    for column in ("messages", "mean ms", "offline ms", "off", "p95 ms", "offline ms", "off"):
        table.add_column(column, justify="right")
    for one in found:
        table.add_row(
            one.trace,
            str(one.messages),
            *(f"{1e3 * seconds:.2f}" for seconds in (one.mean_s, one.expected_mean_s)),
            f"{one.off:+.2%}",
            *(f"{1e3 * seconds:.2f}" for seconds in (one.p95_s, one.expected_p95_s)),
            f"{one.off_p95:+.2%}",
        )
    return table


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    found: list[Agreement] = []

    def document() -> dict[str, Any]:
        about = {"machine": asdict(this_machine()), "versions": asdict(these_versions()), "allowed": ALLOWED}
        return {"schema_version": 1, **about, "agreements": [{**asdict(one), "off": one.off} for one in found]}

    with tempfile.TemporaryDirectory() as folder, kept(args.output, document, document):
        asyncio.run(measure_all(args.traces or made_up(folder), args.seconds, found))
    console = Console() if sys.stdout.isatty() else Console(width=130)
    console.print(f"machine: {this_machine()}; RTT {RTT_MS:g} ms besides the queue")
    console.print(table_of(found))
    worst = max(abs(one.off) for one in found)
    console.print(
        f"means differ by at most {worst:.2%}: {'within' if worst <= ALLOWED else 'NOT within'} {ALLOWED:.0%}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
