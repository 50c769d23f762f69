"""Puts the figures of benchmarks/links.py into docs/comparison.md, and draws docs/links.png from the page.

    .venv/bin/python -m benchmarks.links --only none --page

The picture holds the figures as text, for a test that compares the two.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE, PICTURE = DOCS / "comparison.md", DOCS / "links.png"
MARK, END = "<!-- written by {} --page -->", "<!-- end -->"
LINKS, CAPACITY = "benchmarks.links", "benchmarks.capacity"
NOTHING = "–"
HEAD = (
    "| link | plain, ms a token | lookup | rounds that wait | never waiting | late steps |",
    "|---|---|---|---|---|---|",
)
# colors and markers of the report's plots
LOOKS = {"lookup": ("#9b2d5e", "<"), "rounds that wait": ("#0b6fb3", "o"), "never waiting": ("#7a6a00", ">")}


@dataclass(frozen=True, slots=True)
class Row:
    """A link's plain milliseconds per token, and the others' ratios to them; None: not measured."""

    link: str
    plain_ms: float
    lookup: float
    waiting: float | None
    running: float
    late: float  # share of late steps

    def __str__(self) -> str:
        waiting = NOTHING if self.waiting is None else f"{self.waiting:.2f}"
        ratios = f"{self.lookup:.2f} | {waiting} | {self.running:.2f}"
        return f"| {self.link} | {self.plain_ms:.1f} | {ratios} | {100 * self.late:.0f} % |"


Points = dict[str, dict[str, float]]  # times over plain decoding's, by link and way


def publish(how: str, rows: Sequence[Row], bars: Sequence[str], page: Path = PAGE, picture: Path = PICTURE) -> None:
    """Writes the figures into the page, and draws them."""
    shown = f"![Time per token on each link, plain decoding = 1]({picture.name})"
    write(LINKS, [how, "", shown, "", *HEAD, *map(str, rows), "", *(f"- {bar}" for bar in bars)], page)
    draw(figures(page), picture)


def write(by: str, lines: Sequence[str], page: Path = PAGE) -> None:
    """Replaces the lines between the marks of benchmark `by`. Raises ValueError."""
    begin = MARK.format(by)
    before, found, rest = page.read_text(encoding="utf-8").partition(begin)
    _, end, after = rest.partition(END)
    if not (found and end):
        raise ValueError(f"{page} does not have {begin} and {END} after it")
    page.write_text("\n".join([before + begin, "", *lines, "", END + after]), encoding="utf-8")


def figures(page: Path = PAGE) -> Points:
    """Returns a page's figures; none before any was written."""
    written = page.read_text(encoding="utf-8").partition(MARK.format(LINKS))[2].partition(END)[0]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in re.findall(r"^\| .*\d.*$", written, re.M)]
    return {
        row[0]: {name: float(value) for name, value in zip(LOOKS, row[2:5], strict=True) if value != NOTHING}
        for row in cells
    }


def text(points: Points) -> str:
    """Returns the figures as the picture holds them."""
    return json.dumps(points)


def draw(points: Points, file: Path) -> None:
    """Draws a row per link, a marker per architecture, and stores the figures in the picture."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1.4 + 0.29 * len(points)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.axvline(1, color="0.4", linewidth=1.5, linestyle="--", label="plain decoding = 1")
    for name, (color, marker) in LOOKS.items():
        known = [(of[name], place) for place, of in enumerate(points.values()) if name in of]
        if known:
            axes.plot(*zip(*known, strict=True), marker, color=color, label=name, markersize=7)
    axes.set_xscale("log")
    most = max((value for of in points.values() for value in of.values()), default=1.0)
    ticks = [tick for tick in (0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.5, 2, 3, 5, 10) if tick <= max(1.0, most)]
    axes.set_xticks(ticks, labels=[f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_yticks(range(len(points)), labels=list(points))
    axes.set_ylim(len(points) - 0.5, -0.5)
    axes.set_xlabel("time per token, plain decoding = 1 (rehearsed steps, emulated links)")
    axes.grid(alpha=0.25)
    figure.legend(loc="outside upper left", ncols=4, frameon=False)
    figure.savefig(file, dpi=110, metadata={"Description": text(points), "Software": None})
