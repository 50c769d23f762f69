"""Measures where a native step's time goes, phase by phase on both threads, and steps of few tokens over one.

    .venv/bin/python -m benchmarks.phases

Compiles the library with clocks (`TANDEM_PHASES`). One thread and two run in turn in one process; a phase's times are
those of the quickest of several runs of steps, so that other programs count as little as can be.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

from benchmarks import bandwidth, quantised
from benchmarks.arguments import Parser, positive
from benchmarks.others import watch
from tandem.runners.native import compilation
from tandem.runners.native.library import RowBatch, zeros
from tandem.runners.native.native_runner import NativeRunner

PHASES = ("embedding", "q, k, v", "rotation", "attention", "o", "gate, up", "down", "output")
PARTS = ("all", "input", "claims", "waiting")  # as in system.h; `all` leaves out inputs that each thread makes itself
WIDTHS, TOGETHER = (1, 4, 8, 64), 8
THREADS = ((2, 0), (2, 1), (1, 0))  # of how many, which
TOKENS = [(997 * i + 13) % 40000 for i in range(quantised.PREFIX + quantised.CHUNK)]


@dataclass
class TimedSteps:
    """Steps of one width on a number of threads."""

    milliseconds: list[float] = field(default_factory=list)
    least: float = math.inf  # of a run
    parts: dict[tuple[int, str, str], float] = field(default_factory=dict)  # of that run, us a step


def step(runner: NativeRunner, width: int) -> None:
    """A part of a prompt, or the verification of a greedy draft, whose logits nobody reads."""
    model, row = runner.model, TOKENS[quantised.PREFIX :][:width]
    if width == quantised.CHUNK:
        model.feed([0], [quantised.PREFIX], [row], 0)
        return
    batch = RowBatch([0], [quantised.PREFIX], [row])
    model.library.tandem_verify(model.handle, ctypes.byref(batch.rows), None, zeros(width), zeros(1), None)


def measure(runner: NativeRunner, width: int, to: TimedSteps) -> None:
    spent = runner.model.library.tandem_spent
    spent.restype = ctypes.POINTER(ctypes.c_int64)
    names = [*itertools.product((0, 1), PHASES, PARTS)]
    before, taken = spent()[: len(names)], []
    for _ in range(TOGETHER):
        began = time.perf_counter()
        step(runner, width)
        taken.append(1000 * (time.perf_counter() - began))
    to.milliseconds += taken
    if sum(taken) < to.least:
        after, to.least = spent()[: len(names)], sum(taken)
        to.parts = {n: (b - a) / 1000 / TOGETHER for n, a, b in zip(names, before, after, strict=True)}


def report(form: str, found: dict[tuple[int, int], TimedSteps], limit: float, console: Console) -> None:
    medians = {key: statistics.median(steps.milliseconds) for key, steps in found.items()}
    for width in WIDTHS:
        table = Table(title=f"{form}, {width} tokens: microseconds a step of each of two threads (and of one)")
        for column in ("phase", "work", *PARTS[1:]):
            table.add_column(column, justify="left" if column == "phase" else "right")
        for phase in (*PHASES, "sum"):
            cells = [
                [sum(found[of, width].parts[t, p, part] for p in PHASES if phase in (p, "sum")) for of, t in THREADS]
                for part in PARTS
            ]
            cells[0] = [whole - claims - waiting for whole, _, claims, waiting in zip(*cells, strict=True)]
            table.add_row(phase, *(f"{first:.0f} {second:.0f} ({alone:.0f})" for first, second, alone in cells))
        console.print(table)
        both, alone, once = medians[2, width], medians[1, width], medians[2, 1]
        console.print(f"{both:.2f} ms, {both / alone:.2f} of one thread's, {both / once:.2f} of a step of one token")
    console.print(f"{form}: memory allows {limit:.2f} ms, {limit / medians[2, 1]:.2f} of a step of one token")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    p = Parser(prog="benchmarks.phases", description=(__doc__ or "").splitlines()[0])
    p.flag("--formats", default="as-stored,int8,bfloat16", help="values of --weights (default: %(default)s)")
    p.flag("--runs", type=positive, default=12, help=f"runs of {TOGETHER} steps (default: %(default)s)")
    args = p.parse_args(argv)
    args.formats = args.formats.split(",")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args, console = parse(argv), Console() if sys.stdout.isatty() else Console(width=130)
    compilation.FLAGS = (*compilation.FLAGS, "-DTANDEM_PHASES")
    busy, rate = watch(), bandwidth.bandwidth_of(bandwidth.measure(2), 2)
    for form in args.formats:
        runners = {
            threads: quantised.load(form, argparse.Namespace(model=None, threads=threads, window=quantised.CHUNK))
            for threads in (1, 2)
        }
        found = {(threads, width): TimedSteps() for threads in runners for width in WIDTHS}
        for start, runner in itertools.product(range(0, quantised.PREFIX, quantised.CHUNK), runners.values()):
            runner.model.feed([0], [start], [TOKENS[start : start + quantised.CHUNK]], 0)
        for width, _, threads in itertools.product(WIDTHS, range(args.runs), runners):
            measure(runners[threads], width, found[threads, width])
        report(form, found, 1000 * runners[2].model.weight_bytes / rate, console)
    if busy is not None:
        console.print(f"before it began, {busy:.0%} of the machine was busy with other work")
    return 0


if __name__ == "__main__":
    sys.exit(main())
