"""Compares a target that never waits with plain decoding and lookup, on links of all kinds, rehearsed.

`python -m benchmarks.links [UP,DOWN ...]` measures cell by cell: constant round trips of 10 to 200 ms, recorded links
(without files, eight that are generated), and hostile ones. Each cell is a comparison with a folder of its own, which
is written before anything is judged. A cell whose comparison is complete is not measured again, so the benchmark can be
interrupted, and its cells can be measured one by one, or several beside each other (`--only 10ms,recorded`); `--list`
says how long each takes. At the end all that is there is judged; `--only none` measures nothing, and `--page` puts the
figures into docs/comparison.md and draws docs/links.png (benchmarks/links_page.py).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from rich.console import Console

from benchmarks.arguments import Parser, positive
from benchmarks.links_judged import LOOKUP, PLAIN, RUNNING, WAITING, bars_of, cells_of, how_measured, measured, table_of
from benchmarks.links_page import publish
from tandem.cli import compare
from tandem.comparison.analysis.comparison import Comparison, read_comparison
from tandem.comparison.links.link_settings import read_trace
from tandem.host.device_times import times_named
from tests.comparison.reference_queue import generated

RIVALS = f"{PLAIN},{LOOKUP},{RUNNING}"
RTTS = (10, 20, 50, 100, 200)
OTHER_RTT = "20"
GENERATED_MBPS = (0.5, 1, 2, 3, 4, 6, 8, 12)
LONGER = 4  # tokens per request on a hostile link, with half the prompts: requests outlast the link's period
DOUBLING_MS = (20, 40, 80, 160, 320)
PARTS = ("constant", "recorded", "hostile")
NONE = "none"
WORKLOADS = 5
# measured estimates for --list: seconds per cell and request, steps and round trips per token
STARTING_S, REQUEST_S, STEPS_PER_TOKEN, ROUNDS_PER_TOKEN = 70.0, 0.15, 0.75, 0.45


@dataclass(frozen=True, slots=True)
class Asked:
    """A cell to measure."""

    name: str  # and its folder's
    part: str
    flags: tuple[str, ...]  # of the comparison


def made_up(folder: Path) -> list[str]:
    """Writes eight links, each with half the bandwidth up; returns them as UP,DOWN."""
    links = []
    for number, mbps in enumerate(GENERATED_MBPS):
        files = [folder / f"generated-{mbps:g}.{way}" for way in ("up", "down")]
        for file, share in zip(files, (0.5, 1.0), strict=True):
            opportunities = generated(random.Random(number), seconds=30, mbps=mbps * share)
            file.write_text("".join(f"{at}\n" for at in opportunities))
        links.append(",".join(map(str, files)))
    return links


def hostile(folder: Path) -> Iterator[Asked]:
    """Yields round trips that double each second, outages of two seconds, and 1 Mbit/s up.

    Waits for a burst of opportunities double: up to 20 ms each way in the first second, 320 ms in the fifth, and anew.
    """
    bursts = [at for second, wait in enumerate(DOUBLING_MS) for at in range(1000 * second, 1000 * (second + 1), wait)]
    traces = {"doubling": [at for at in bursts for _ in range(20)], "outages": [*range(1, 1001), 3000]}
    for name, times in traces.items():
        file = folder / name
        file.write_text("".join(f"{at}\n" for at in times))
        yield Asked(name, "hostile", ("--rtt-ms", OTHER_RTT, "--link", f"trace:{file},{file}"))
    yield Asked("narrow", "hostile", ("--rtt-ms", OTHER_RTT, "--bandwidth-mbps", "20", "--up-mbps", "1"))


def cells_asked(links: Sequence[str], folder: Path) -> list[Asked]:
    """Returns all cells; writes files of made-up links into `folder`."""
    constant = [Asked(f"{rtt}ms", "constant", ("--rtt-ms", str(rtt))) for rtt in RTTS]
    recorded = [
        Asked(
            f"{number}-{Path(link.split(',')[0]).stem}",
            "recorded",
            ("--rtt-ms", OTHER_RTT, "--link", f"trace:{link}"),
        )
        for number, link in enumerate(links or made_up(folder), 1)
    ]
    return [*constant, *recorded, *hostile(folder)]


def chosen(only: str | None, cells: Sequence[Asked]) -> list[Asked]:
    """Returns the cells that `--only` names, parts or numbers included. Raises ValueError."""
    if only is None or only == NONE:
        return [] if only else list(cells)
    named = only.split(",")
    known = {*PARTS, *(cell.name for cell in cells)}
    if unknown := sorted(set(named) - known):
        raise ValueError(f"--only: {unknown[0]} is none of {', '.join((*PARTS, *(c.name for c in cells), NONE))}")
    return [cell for cell in cells if {cell.name, cell.part} & set(named)]


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(prog="links", description=__doc__, allow_abbrev=False)
    parser.add_argument("links", nargs="*", metavar="UP,DOWN", help="recorded links (default: eight generated ones)")
    parser.flag(
        "--only", metavar="NAME,...", help=f"measure these parts ({', '.join(PARTS)}) or cells, or none (default: all)"
    )
    parser.flag("--list", action="store_true", help="print the cells, and how long they take")
    parser.flag("--page", action="store_true", help="put the figures into docs/comparison.md, and draw docs/links.png")
    parser.flag("--rehearse", default="trn2-llama-8b", help="a preset or a file (default: %(default)s)")
    parser.flag("--prompts-per-workload", type=positive, default=4, metavar="N", help="of 5 kinds (default: 4)")
    parser.flag("--max-new-tokens", type=positive, default=48, metavar="N", help="(default: %(default)s)")
    parser.flag("--output", type=Path, default=Path("results/links"), help="folder (default: %(default)s)")
    args = parser.parse_args(argv)
    made = args.output / "links"
    made.mkdir(parents=True, exist_ok=True)
    try:
        for path in (path for link in args.links for path in link.split(",")):
            read_trace(path)
        args.cells = cells_asked(args.links, made)
        args.chosen = chosen(args.only, args.cells)
    except ValueError as error:
        parser.error(str(error))
    return args


def size_of(cell: Asked, args: argparse.Namespace) -> tuple[int, int]:
    """Returns the prompts per workload, and the tokens per request."""
    prompts, tokens = args.prompts_per_workload, args.max_new_tokens
    return (-(-prompts // 2), LONGER * tokens) if cell.part == "hostile" else (prompts, tokens)


def ways_of(cell: Asked) -> list[str]:
    return [*RIVALS.split(","), *((WAITING,) if cell.part == "constant" else ())]


def expected_s(cell: Asked, args: argparse.Namespace) -> float:
    """Estimates the seconds of a cell whose link passes everything."""
    step, rtt = times_named(args.rehearse).target, float(cell.flags[1]) / 1000
    each = step.seconds(1) if step else 0.0
    prompts, tokens = size_of(cell, args)
    tokens_s = {PLAIN: each, WAITING: ROUNDS_PER_TOKEN * (each + rtt)}
    ways = [tokens_s.get(way, STEPS_PER_TOKEN * each) for way in ways_of(cell)]
    return STARTING_S + WORKLOADS * prompts * sum(REQUEST_S + tokens * way for way in ways)


def took_s(file: Path) -> float:
    """Returns the seconds from a comparison's start to its file."""
    return file.stat().st_mtime - datetime.fromisoformat(read_comparison(file).started_at).timestamp()


def measure(cell: Asked, args: argparse.Namespace) -> int:
    """Runs a cell's comparison; returns its exit code."""
    prompts, tokens = size_of(cell, args)
    asked = ["--prompts-per-workload", str(prompts), "--max-new-tokens", str(tokens)]
    asked += ["--rehearse", args.rehearse, "--architectures", ",".join(ways_of(cell)), *cell.flags]
    return compare.main([*asked, "--output-dir", str(args.output / cell.name)])


def list_cells(cells: Sequence[Asked], files: Mapping[str, Path], args: argparse.Namespace) -> None:
    """Prints the cells with measured or expected seconds."""
    left = 0.0
    for cell in cells:
        if measured(files[cell.name]):
            said = f"measured in {took_s(files[cell.name]):.0f} s"
        else:
            left += (expected := expected_s(cell, args))
            said = f"not measured, about {expected:.0f} s"
        print(f"{cell.name} ({cell.part}): {said}")
    print(f"left: about {left / 60:.0f} minutes")


def how(comparisons: Sequence[Comparison], args: argparse.Namespace) -> str:
    """Describes the measurement: setting, place, time."""
    return (
        f"Times per token over plain decoding's, `{args.rehearse}` rehearsed, {WORKLOADS * args.prompts_per_workload}"
        f" prompts of {args.max_new_tokens} tokens on each link, half of them {LONGER} times as long on hostile ones"
        f" ({how_measured(comparisons)}):"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measures missing cells, prints cells and bars; returns 1 if a bar fails."""
    args = parse(argv)
    files = {cell.name: args.output / cell.name / "comparison.json" for cell in args.cells}
    if args.list:
        list_cells(args.cells, files, args)
        return 0
    for cell in (cell for cell in args.chosen if not measured(files[cell.name])):
        if (code := measure(cell, args)) not in (0, 1):
            print(f"links: the comparison of {cell.name} ended with {code}", file=sys.stderr)
            return code
    comparisons = [read_comparison(file) for file in files.values() if measured(file)]
    cells = [cell for comparison in comparisons for cell in cells_of(comparison)]
    if not cells:
        print("links: no link was measured with all three architectures", file=sys.stderr)
        return 1
    bars = bars_of(cells)
    console = Console() if sys.stdout.isatty() else Console(width=130)
    console.print(table_of(cells))
    told = [f"{'met' if holds else 'MISSED'}: {said}" for said, holds in bars]
    for line in told:
        console.print(line, highlight=False)
    if args.page:
        publish(how(comparisons, args), [cell.row for cell in cells], told)
    summary = {"cells": [asdict(cell) for cell in cells], "bars": bars}
    (args.output / "links.json").write_text(json.dumps(summary, indent=1) + "\n")
    return 0 if all(holds for _, holds in bars) else 1


if __name__ == "__main__":
    sys.exit(main())
