"""Measures the cost of a distributed round beyond drafting and verifying: `python -m benchmarks.round_overhead`.

Rounds go to a server process with the toy runner, whose step takes almost no time, and to the real target, where server
and device share cores.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.arguments import Parser, positive
from benchmarks.round_overhead_wire import (
    SEQUENCE_LENGTH,
    Round,
    Row,
    difference,
    direct,
    empty_calls,
    round_rows,
    rounds_over,
)
from tandem.comparison.measuring.machine import this_machine
from tandem.comparison.measuring.servers import Fleet
from tandem.launch import LAUNCH
from tandem.rpc.generation_client import GenerationClient
from tandem.speculation.types import ModelInfo

AIM_MS = 1.0


@dataclass(frozen=True, slots=True)
class Report:
    """Tables by title, and overheads in milliseconds that must be below the aim."""

    tables: dict[str, list[Row]]
    overheads: dict[str, float]
    seconds: float


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(prog="round_overhead", description=__doc__, allow_abbrev=False)
    parser.flag("--rounds", type=positive, default=500, metavar="N", help="against the toy server (default: 500)")
    parser.flag("--real-rounds", type=int, default=100, metavar="N", help="against the real target; 0: none")
    parser.flag("--speculation-length", type=positive, default=5, metavar="K", help="draft tokens a round (default: 5)")
    parser.flag(
        "--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"), help="of the real target"
    )
    parser.flag("--threads", type=positive, help="CPU threads of the real target (default: torch's choice)")
    parser.flag("--output", type=Path, default=Path("results/round_overhead.json"), help="(default: %(default)s)")
    return parser.parse_args(argv)


@contextlib.asynccontextmanager
async def target_server(name: str, k: int, *extra: str) -> AsyncIterator[tuple[str, ModelInfo]]:
    with tempfile.TemporaryDirectory(prefix="round_overhead") as logs:
        async with Fleet(Path(logs)) as fleet:
            command = [*LAUNCH, "--role", "target", "--port", "0", "--speculation_length", str(k)]
            command += ["--sequence_length", str(SEQUENCE_LENGTH)]
            server = await fleet.start(name, [*command, *extra])
            async with GenerationClient.connect(server.address, "TargetVerifier") as client:
                info = await client.model_info()
            yield server.address, info


async def measure(args: argparse.Namespace, say: Callable[[str], None]) -> Report:
    began = time.perf_counter()
    k, count = args.speculation_length, args.rounds
    say(f"{count} rounds against a server of the toy runner")
    async with target_server("toy", k, "--backend", "toy") as (address, info):
        empty = await empty_calls(address, count)
        toy = await rounds_over(address, info, count, k)
    tables, overheads = {}, {}
    tables["A round against the toy server, over loopback"], overheads["toy server"] = _tables(toy, empty)
    if args.real_rounds:
        say(f"{args.real_rounds} rounds against the real target")
        threads = ["--threads", str(args.threads)] if args.threads else []
        async with target_server("target", k, "--dtype", args.dtype, *threads) as (address, info):
            real = await rounds_over(address, info, args.real_rounds, k)
            empty = await empty_calls(address, args.real_rounds)
        tables["A round against the real target, over loopback"], overheads["real target"] = _tables(real, empty)
    return Report(tables, overheads, time.perf_counter() - began)


def _tables(rounds: Sequence[Round], empty: Sequence[float]) -> tuple[list[Row], float]:
    """Returns a server's rows, and the overhead in milliseconds."""
    rows = [
        *round_rows(rounds),
        direct("empty call", empty, "GetModelInfo: gRPC's own floor, with a message of some 200 bytes"),
        difference("overhead", [r.wall - r.compute for r in rounds], "the whole round less compute, round by round"),
    ]
    return rows, rows[-1].p50_ms


def table_of(title: str, rows: Sequence[Row]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("part")
    for column in ("median ms", "p99 ms"):
        table.add_column(column, justify="right")
    table.add_column("measured")
    table.add_column("what it is")
    for row in rows:
        table.add_row(row.part, f"{row.p50_ms:.4f}", f"{row.p99_ms:.4f}", row.how, row.what)
    return table


def document(args: argparse.Namespace, report: Report) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "machine": asdict(this_machine()),
        "settings": {name: str(value) for name, value in vars(args).items()},
        "tables": {title: [asdict(row) for row in rows] for title, rows in report.tables.items()},
        "overheads_ms": report.overheads,
        "aim_ms": AIM_MS,
        "seconds": report.seconds,
    }


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    report = asyncio.run(measure(args, lambda text: print(text, file=sys.stderr, flush=True)))
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(document(args, report), indent=1) + "\n")
    console = Console() if sys.stdout.isatty() else Console(width=150)
    console.print(f"machine: {this_machine()}; k = {args.speculation_length}", highlight=False)
    for title, rows in report.tables.items():
        console.print(table_of(title, rows))
    for server, overhead in report.overheads.items():
        verdict = "[green]below[/green]" if overhead < AIM_MS else "[bold red]above[/bold red]"
        console.print(
            f"overhead per round, {server}: {overhead:.3f} ms, {verdict} the aim of {AIM_MS:g} ms", highlight=False
        )
    console.print(f"took {report.seconds:.0f} s; wrote {args.output}", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
