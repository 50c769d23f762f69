"""Judges a target that never waits on links: cells, table, and the bars of benchmarks/links.py."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from benchmarks.links_page import Row
from tandem.comparison.analysis import words
from tandem.comparison.analysis.comparison import Comparison, read_comparison

PLAIN, LOOKUP, RUNNING, WAITING = "autoregressive", "lookup", "never_waiting", "distributed"
MOST_OF_LOOKUP, MOST_OF_PLAIN = 1.00, 0.80


@dataclass(frozen=True, slots=True)
class Cell:
    """One link: mean seconds per token, and outputs."""

    link: str
    plain_s: float
    lookup_s: float
    running_s: float
    identical: int  # outputs equal to plain decoding's
    outputs: int
    late: float = 0.0  # share of late rehearsed steps, at the server with most
    waiting_s: float | None = None  # of waiting rounds, if measured

    @property
    def of_lookup(self) -> float:
        return self.running_s / self.lookup_s

    @property
    def of_plain(self) -> float:
        return self.running_s / self.plain_s

    @property
    def row(self) -> Row:
        waiting = None if self.waiting_s is None else self.waiting_s / self.plain_s
        lookup = self.lookup_s / self.plain_s
        return Row(self.link, 1000 * self.plain_s, lookup, waiting, self.of_plain, self.late)


def cells_of(comparison: Comparison) -> Iterator[Cell]:
    """Yields a comparison's links on which all three were measured."""
    for measured in comparison.links:
        tpots = {s.architecture: s.tpot_s for s in measured.summaries if s.tpot_s is not None}
        if not {PLAIN, LOOKUP, RUNNING} <= set(tpots):
            continue
        plain, lookup, running = (tpots[name] for name in (PLAIN, LOOKUP, RUNNING))
        same = [s.identical for s in measured.summaries if s.architecture in (LOOKUP, RUNNING) and s.identical]
        identical, outputs = sum(one.count for one in same), sum(one.total for one in same)
        link = words.link(measured.link)
        yield Cell(link, plain, lookup, running, identical, outputs, late_steps(comparison), tpots.get(WAITING))


def late_steps(comparison: Comparison) -> float:
    """Returns the share of late steps, at the server with most."""
    rehearsals = [each for endpoint in comparison.endpoints for each in endpoint.model.rehearsals]
    return max((each.late_steps / each.steps for each in rehearsals if each.steps), default=0.0)


def bars_of(cells: Sequence[Cell]) -> list[tuple[str, bool]]:
    """Returns the bars, each with whether measured cells meet it."""
    worst = max(cells, key=lambda cell: cell.of_lookup)
    median = statistics.median(cell.of_plain for cell in cells)
    identical, outputs = sum(cell.identical for cell in cells), sum(cell.outputs for cell in cells)
    return [
        (f"outputs are plain decoding's: {identical} of {outputs}", identical == outputs),
        (
            f"never waiting takes at most {MOST_OF_LOOKUP:.2f} of lookup's time in every cell:"
            f" {worst.of_lookup:.2f} at {worst.link}",
            worst.of_lookup <= MOST_OF_LOOKUP,
        ),
        (f"at most {MOST_OF_PLAIN:.2f} of plain decoding's in the median: {median:.2f}", median <= MOST_OF_PLAIN),
    ]


def table_of(cells: Sequence[Cell]) -> Table:
    table = Table(title="Milliseconds a token, rehearsed, on emulated links", title_justify="left")
    table.add_column("link")
    for column in ("plain", "lookup", "never waiting", "of lookup", "of plain", "late steps"):
        table.add_column(column, justify="right")
    for cell in cells:
        times = (f"{1000 * seconds:.1f}" for seconds in (cell.plain_s, cell.lookup_s, cell.running_s))
        table.add_row(cell.link, *times, f"{cell.of_lookup:.2f}", f"{cell.of_plain:.2f}", f"{cell.late:.0%}")
    return table


def measured(path: Path) -> bool:
    """Whether a complete comparison exists."""
    return path.is_file() and read_comparison(path).missing is None


def how_measured(comparisons: Sequence[Comparison]) -> str:
    days = sorted({each.started_at[:10] for each in comparisons})
    machines = dict.fromkeys(str(each.machine) for each in comparisons)
    return "; ".join((" to ".join(dict.fromkeys((days[0], days[-1]))), *machines))
