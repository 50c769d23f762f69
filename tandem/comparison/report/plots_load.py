"""Plots throughput against latency under load."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tandem.comparison.report.load_tables import Row, rows_of
from tandem.comparison.report.reading import JSON, NothingToDraw
from tandem.comparison.report.style import INK, PAPER, QUIET, look, new_figure, styled, title_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANELS = (("ttft_s", "median TTFT, ms"), ("tpot_s", "median TPOT, ms"))
THROUGHPUT = "mean_output_throughput_token_per_s"


def drawable(comparison: JSON) -> list[Row]:
    """Returns the rows that have a throughput. Raises NothingToDraw."""
    rows = rows_of(comparison)
    if not rows:
        raise NothingToDraw("No load was measured (--concurrency, --rate).")
    rows = [row for row in rows if row.figures[THROUGHPUT] and row.summary["ttft_s"]["p50"] is not None]
    if not rows:
        raise NothingToDraw("No request under load completed.")
    return rows


@styled
def latency_by_throughput(comparison: JSON) -> Figure:
    """Draws a line for each architecture through its closed loops, and one through its open loops."""
    rows = drawable(comparison)
    everyone = list(dict.fromkeys(row.architecture for row in rows))
    figure, panels = new_figure(5.2, rows=2, sharex=True)
    for axes, (metric, label) in zip(panels, PANELS, strict=True):
        top = 0.0
        for name in everyone:
            of = [row for row in rows if row.architecture == name]
            top = max(top, _line(axes, [row for row in of if row.point["rate"] is None], metric, everyone))
            top = max(top, _line(axes, [row for row in of if row.point["rate"] is not None], metric, everyone))
        axes.set_ylim(0, 1.12 * top if top else 1.0)
        axes.set_ylabel(label)
    panels[-1].set_xlim(0, 1.04 * max(float(row.figures[THROUGHPUT]) for row in rows))
    panels[-1].set_xlabel("output tokens per second, all requests together")
    _legend(figure, everyone, rows)
    return figure


def _line(axes: Axes, rows: list[Row], metric: str, everyone: list[str]) -> float:
    """Draws one line and returns its highest point. Open loops are dashed, with hollow markers."""
    seconds = [(row, row.summary[metric]["p50"]) for row in rows]
    points = [(row, float(row.figures[THROUGHPUT]), 1000 * value) for row, value in seconds if value is not None]
    if not points:
        return 0.0
    of, is_open = look(rows[0].architecture, everyone), rows[0].point["rate"] is not None
    axes.plot(
        [x for _, x, _ in points], [y for _, _, y in points], color=of.color, marker=of.marker, clip_on=False,
        linestyle=(0, (4, 2)) if is_open else "-", markerfacecolor=PAPER if is_open else of.color,
        markeredgecolor=of.color if is_open else PAPER, zorder=3,
    )  # fmt: skip
    return max(y for _, _, y in points)


def loads_of(rows: list[Row]) -> tuple[str, str]:
    """Returns the closed and the open loops in words, each empty if there is none: '1, 4, 8 at once'."""
    users = dict.fromkeys(str(row.point["concurrency"]) for row in rows if row.point["rate"] is None)
    rates = dict.fromkeys(f"{row.point['rate']:g}" for row in rows if row.point["rate"] is not None)
    return f"{', '.join(users)} at once" if users else "", f"{', '.join(rates)} requests/s" if rates else ""


def _legend(figure: Figure, everyone: list[str], rows: list[Row]) -> None:
    """Names the architectures and, with the style of their lines, the loads."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=look(n, everyone).color, marker=look(n, everyone).marker, markeredgecolor=PAPER,
               label=title_of(n))
        for n in everyone
    ]  # fmt: skip
    for load, is_open in zip(loads_of(rows), (False, True), strict=True):
        if load:
            handles.append(
                Line2D([], [], color=QUIET, linestyle=(0, (4, 2)) if is_open else "-", marker="o",
                       markerfacecolor=PAPER if is_open else QUIET, markeredgecolor=QUIET, label=load)
            )  # fmt: skip
    figure.legend(
        handles=handles, loc="outside upper left", ncols=min(3, len(handles)), columnspacing=1.2, borderpad=0,
        labelcolor=INK,
    )  # fmt: skip
