"""Judges comparisons on links of a target that never waits: cells, their table, and the bars of benchmarks/links.py."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.links_page import Row
from tandem.comparison.report.reading import machine, read_comparison

PLAIN, LOOKUP, RUNNING, WAITING = "autoregressive", "lookup", "never_waiting", "distributed"
MOST_OF_LOOKUP, MOST_OF_PLAIN, OFF, WITHIN = 1.00, 0.80, 0.10, 0.9


@dataclass(frozen=True, slots=True)
class Cell:
    """One link: mean seconds per token, how many outputs are plain decoding's, and how far the formula is off.

    `late`: the share of rehearsed steps that took longer here than there, at the server that was late most often.
    `waiting_s`: of rounds that wait, where they were measured.
    """

    link: str
    plain_s: float
    lookup_s: float
    running_s: float
    identical: int
    outputs: int
    off: float | None
    late: float = 0.0
    waiting_s: float | None = None

    @property
    def of_lookup(self) -> float:
        return self.running_s / self.lookup_s

    @property
    def of_plain(self) -> float:
        return self.running_s / self.plain_s

    @property
    def row(self) -> Row:
        """The cell as the page has it."""
        waiting = None if self.waiting_s is None else self.waiting_s / self.plain_s
        lookup = self.lookup_s / self.plain_s
        return Row(self.link, 1000 * self.plain_s, lookup, waiting, self.of_plain, self.off, self.late)


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
        waiting = found[WAITING]["tpot_s"]["mean"] if WAITING in found else None
        yield Cell(link, plain, lookup, running, identical, outputs, off, late_steps(comparison), waiting)


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


def measured(path: Path) -> bool:
    """Whether there is a complete comparison."""
    return path.is_file() and not read_comparison(path).get("partial")


def how_measured(comparisons: Sequence[Mapping[str, Any]]) -> str:
    """Says where and when comparisons were measured."""
    days = sorted({str(each["started_at"])[:10] for each in comparisons})
    machines = dict.fromkeys(machine(each["machine"]) for each in comparisons)
    return "; ".join((" to ".join(dict.fromkeys((days[0], days[-1]))), *machines))
