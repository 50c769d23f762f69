"""Compares a target that never waits with plain decoding and lookup, on constant and recorded links, rehearsed.

`python -m benchmarks.links [UP,DOWN ...]` compares on links of 10 to 200 ms, and on recorded links (without files, on
eight that are generated), each part into a folder of its own. A part whose folder has a complete comparison.json is not
measured again, so it can be run in parts (`--only`), and at the end all that is there is judged.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
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
ARCHITECTURES = f"{PLAIN},{LOOKUP},distributed,{RUNNING}"
RTTS = "10,20,50,100,200"
RECORDED_RTT = "20"
GENERATED_MBPS = (0.5, 1, 2, 3, 4, 6, 8, 12)
MOST_OF_LOOKUP, MOST_OF_PLAIN, OFF, WITHIN = 1.00, 0.80, 0.10, 0.9
PARTS = ("constant", "recorded")


@dataclass(frozen=True, slots=True)
class Cell:
    """One link: mean seconds per token, how many outputs are plain decoding's, and how far the formula is off."""

    link: str
    plain_s: float
    lookup_s: float
    running_s: float
    identical: int
    outputs: int
    off: float | None

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
        yield Cell(link, plain, lookup, running, identical, outputs, predicted.get(condition["name"]))


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
    for column in ("plain", "lookup", "never waiting", "of lookup", "of plain", "formula off"):
        table.add_column(column, justify="right")
    for cell in cells:
        times = (f"{1000 * seconds:.1f}" for seconds in (cell.plain_s, cell.lookup_s, cell.running_s))
        off = "" if cell.off is None else f"{cell.off:+.0%}"
        table.add_row(cell.link, *times, f"{cell.of_lookup:.2f}", f"{cell.of_plain:.2f}", off)
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


def flags_of(part: str, links: Sequence[str]) -> list[str]:
    """The flags of a part's links."""
    if part == "constant":
        return ["--rtt-ms", RTTS]
    return ["--rtt-ms", RECORDED_RTT, *(word for link in links for word in ("--link", f"trace:{link}"))]


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(prog="links", description=__doc__, allow_abbrev=False)
    parser.add_argument("links", nargs="*", metavar="UP,DOWN", help="recorded links (default: eight generated ones)")
    parser.flag("--only", choices=PARTS, help="measure this part alone (default: both)")
    parser.flag("--rehearse", default="trn2-llama-8b", help="a preset or a file (default: %(default)s)")
    parser.flag("--prompts-per-workload", type=positive, default=4, metavar="N", help="of 5 kinds (default: 4)")
    parser.flag("--max-new-tokens", type=positive, default=48, metavar="N", help="(default: %(default)s)")
    parser.flag("--output", type=Path, default=Path("results/links"), help="folder (default: %(default)s)")
    args = parser.parse_args(argv)
    try:
        for path in (path for link in args.links for path in link.split(",")):
            read_trace(path)
    except ValueError as error:
        parser.error(str(error))
    return args


def measured(path: Path) -> bool:
    return path.is_file() and not read_comparison(path).get("partial")


def main(argv: Sequence[str] | None = None) -> int:
    """Measures what is missing, prints cells and bars, and returns 0 if all bars hold, 1 if not."""
    args = parse(argv)
    files = {part: args.output / part / "comparison.json" for part in PARTS}
    with tempfile.TemporaryDirectory() as folder:
        links = args.links or made_up(Path(folder))
        for part in (part for part in PARTS if args.only in (None, part) and not measured(files[part])):
            asked = ["--prompts-per-workload", str(args.prompts_per_workload), "--max-new-tokens"]
            asked += [str(args.max_new_tokens), "--rehearse", args.rehearse, "--architectures", ARCHITECTURES]
            code = compare.main([*asked, *flags_of(part, links), "--output-dir", str(args.output / part)])
            if code not in (0, 1):
                print(f"links: the comparison on {part} links ended with {code}", file=sys.stderr)
                return code
    cells = [cell for file in files.values() if file.is_file() for cell in cells_of(read_comparison(file))]
    if not cells:
        print("links: no link was measured with all three architectures", file=sys.stderr)
        return 1
    bars = bars_of(cells)
    console = Console() if sys.stdout.isatty() else Console(width=130)
    console.print(table_of(cells))
    for said, holds in bars:
        console.print(f"{'holds' if holds else 'FAILS'}: {said}", highlight=False)
    summary = {"cells": [{name: getattr(cell, name) for name in cell.__slots__} for cell in cells], "bars": bars}
    (args.output / "links.json").write_text(json.dumps(summary, indent=1) + "\n")
    return 0 if all(holds for _, holds in bars) else 1


if __name__ == "__main__":
    sys.exit(main())
