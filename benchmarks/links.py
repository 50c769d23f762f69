"""Compares a target that never waits with plain decoding and lookup, on links of all kinds, rehearsed.

`python -m benchmarks.links [UP,DOWN ...]` measures cell by cell: constant round trips of 10 to 200 ms, recorded links
(without files, eight that are generated), and hostile ones. Each cell is a comparison with a folder of its own, which
is written before anything is judged. A cell whose comparison is complete is not measured again, so the benchmark can be
interrupted, and its cells can be measured one by one, or several beside each other (`--only 10ms,recorded`). At the end
all that is there is judged; `--only none` measures nothing.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.arguments import Parser, positive
from tandem.cli import compare
from tandem.comparison.links.trace import read_trace
from tandem.comparison.report.reading import read_comparison
from tests.comparison.reference_queue import generated

PLAIN, LOOKUP, RUNNING = "autoregressive", "lookup", "never_waiting"
RIVALS = f"{PLAIN},{LOOKUP},{RUNNING}"
"""Measured where the formula says nothing: without rounds that wait, whose costs it needs."""
RTTS = (10, 20, 50, 100, 200)
OTHER_RTT = "20"
GENERATED_MBPS = (0.5, 1, 2, 3, 4, 6, 8, 12)
LONGER = 4
"""Factor of the tokens of a request on a hostile link, with half the prompts: one that is shorter than the link's
period says where it began in that."""
DOUBLING_MS = (20, 40, 80, 160, 320)
MOST_OF_LOOKUP, MOST_OF_PLAIN, OFF, WITHIN = 1.00, 0.80, 0.10, 0.9
PARTS = ("constant", "recorded", "hostile")
NONE = "none"


@dataclass(frozen=True, slots=True)
class Asked:
    """A cell to measure: its name, which is its folder's, the part that it belongs to, and the comparison's flags."""

    name: str
    part: str
    flags: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Cell:
    """One link: mean seconds per token, how many outputs are plain decoding's, and how far the formula is off.

    `late`: the share of rehearsed steps that took longer here than there, at the server that was late most often.
    """

    link: str
    plain_s: float
    lookup_s: float
    running_s: float
    identical: int
    outputs: int
    off: float | None
    late: float = 0.0

    @property
    def of_lookup(self) -> float:
        return self.running_s / self.lookup_s

    @property
    def of_plain(self) -> float:
        return self.running_s / self.plain_s


def cells_of(comparison: Mapping[str, Any]) -> Iterator[Cell]:
    """Yields the links of a comparison on which all three were measured."""
    predicted = {
        p["condition"]: p["error"]
        for p in (comparison["theory"] or {}).get("predictions", ())
        if p["architecture"] == RUNNING
    }
    for condition in comparison["conditions"]:
        found = condition["architectures"]
        if condition["varies"] not in ("base", "link") or not {PLAIN, LOOKUP, RUNNING} <= set(found):
            continue
        plain, lookup, running = (found[name]["tpot_s"]["mean"] for name in (PLAIN, LOOKUP, RUNNING))
        same = [found[name]["identical_to_autoregressive"] for name in (LOOKUP, RUNNING)]
        but = condition["link"]["but"]
        link = f"{condition['link']['rtt_ms']:g} ms{f', {but}' if but else ''}"
        identical, outputs = (sum(one[key] for one in same) for key in ("count", "total"))
        off = predicted.get(condition["name"])
        yield Cell(link, plain, lookup, running, identical, outputs, off, late_steps(comparison))


def late_steps(comparison: Mapping[str, Any]) -> float:
    """Returns the share of late steps, at the server with most."""
    told = [each for server in comparison["servers"].values() for each in server["model"].get("rehearsals") or ()]
    return max((each["late_steps"] / each["steps"] for each in told if each["steps"]), default=0.0)


def bars_of(cells: Sequence[Cell]) -> list[tuple[str, bool]]:
    """Returns the bars, each with whether the measured cells meet it."""
    worst = max(cells, key=lambda cell: cell.of_lookup)
    median = statistics.median(cell.of_plain for cell in cells)
    offs = [abs(cell.off) for cell in cells if cell.off is not None]
    near = sum(off <= OFF for off in offs)
    identical, outputs = sum(cell.identical for cell in cells), sum(cell.outputs for cell in cells)
    bars = [
        (f"outputs are plain decoding's: {identical} of {outputs}", identical == outputs),
        (
            f"never waiting takes at most {MOST_OF_LOOKUP:.2f} of lookup's time in every cell:"
            f" {worst.of_lookup:.2f} at {worst.link}",
            worst.of_lookup <= MOST_OF_LOOKUP,
        ),
        (f"at most {MOST_OF_PLAIN:.2f} of plain decoding's in the median: {median:.2f}", median <= MOST_OF_PLAIN),
    ]
    if offs:
        said = f"the formula within {OFF:.0%} in 9 cells of 10: {near} of {len(offs)}"
        bars.append((said, near >= WITHIN * len(offs)))
    return bars


def table_of(cells: Sequence[Cell]) -> Table:
    table = Table(title="Milliseconds a token, rehearsed, on emulated links", title_justify="left")
    table.add_column("link")
    for column in ("plain", "lookup", "never waiting", "of lookup", "of plain", "formula off", "late steps"):
        table.add_column(column, justify="right")
    for cell in cells:
        times = (f"{1000 * seconds:.1f}" for seconds in (cell.plain_s, cell.lookup_s, cell.running_s))
        off = "" if cell.off is None else f"{cell.off:+.0%}"
        table.add_row(cell.link, *times, f"{cell.of_lookup:.2f}", f"{cell.of_plain:.2f}", off, f"{cell.late:.0%}")
    return table


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
    """Yields round trips that double from one second to the next, outages of two seconds, and 1 Mbit/s up.

    A round trip doubles as the waits for a burst of opportunities do: up to 20 ms each way in the first second, up to
    320 ms in the fifth, and anew.
    """
    bursts = [at for second, wait in enumerate(DOUBLING_MS) for at in range(1000 * second, 1000 * (second + 1), wait)]
    traces = {"doubling": [at for at in bursts for _ in range(20)], "outages": [*range(1, 1001), 3000]}
    for name, times in traces.items():
        file = folder / name
        file.write_text("".join(f"{at}\n" for at in times))
        yield Asked(name, "hostile", ("--rtt-ms", OTHER_RTT, "--link", f"trace:{file},{file}"))
    yield Asked("narrow", "hostile", ("--rtt-ms", OTHER_RTT, "--bandwidth-mbps", "20", "--up-mbps", "1"))


def cells_asked(links: Sequence[str], folder: Path) -> list[Asked]:
    """Returns all cells; `folder` gets the files of links that are made up."""
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
    """Returns the cells that `--only` names, by their names, parts or numbers. Raises ValueError."""
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
    parser.flag("--list", action="store_true", help="print the names of the cells, and which are measured")
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


def measured(path: Path) -> bool:
    return path.is_file() and not read_comparison(path).get("partial")


def measure(cell: Asked, args: argparse.Namespace) -> int:
    """Runs the comparison of a cell, and returns its exit code."""
    architectures = f"{RIVALS},distributed" if cell.part == "constant" else RIVALS
    prompts, tokens = args.prompts_per_workload, args.max_new_tokens
    if cell.part == "hostile":
        prompts, tokens = -(-prompts // 2), LONGER * tokens
    asked = ["--prompts-per-workload", str(prompts), "--max-new-tokens", str(tokens)]
    asked += ["--rehearse", args.rehearse, "--architectures", architectures, *cell.flags]
    return compare.main([*asked, "--output-dir", str(args.output / cell.name)])


def main(argv: Sequence[str] | None = None) -> int:
    """Measures what is missing, prints cells and bars, and returns 0 if all bars hold, 1 if not."""
    args = parse(argv)
    files = {cell.name: args.output / cell.name / "comparison.json" for cell in args.cells}
    if args.list:
        for cell in args.cells:
            print(f"{cell.name} ({cell.part}): {'measured' if measured(files[cell.name]) else 'not measured'}")
        return 0
    for cell in (cell for cell in args.chosen if not measured(files[cell.name])):
        if (code := measure(cell, args)) not in (0, 1):
            print(f"links: the comparison of {cell.name} ended with {code}", file=sys.stderr)
            return code
    cells = [cell for file in files.values() if measured(file) for cell in cells_of(read_comparison(file))]
    if not cells:
        print("links: no link was measured with all three architectures", file=sys.stderr)
        return 1
    bars = bars_of(cells)
    console = Console() if sys.stdout.isatty() else Console(width=130)
    console.print(table_of(cells))
    for said, holds in bars:
        console.print(f"{'met' if holds else 'MISSED'}: {said}", highlight=False)
    summary = {"cells": [{name: getattr(cell, name) for name in cell.__slots__} for cell in cells], "bars": bars}
    (args.output / "links.json").write_text(json.dumps(summary, indent=1) + "\n")
    return 0 if all(holds for _, holds in bars) else 1


if __name__ == "__main__":
    sys.exit(main())
