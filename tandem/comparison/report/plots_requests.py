"""Plots the arrival of one prompt's tokens, and latency against throughput under load."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from tandem.comparison.report import formatting as fmt
from tandem.comparison.report import hover, reading, style
from tandem.comparison.report.load_tables import THROUGHPUT, Row, rows_of
from tandem.comparison.report.reading import JSON, NothingToDraw

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANELS = (("ttft_s", "median TTFT, ms"), ("tpot_s", "median TPOT, ms"))
DASHED = (0, (4, 2))


@style.in_style()
def tokens_over_time(comparison: JSON) -> Figure:
    """Draws one prompt of the base in every architecture, with a step for every chunk."""
    _, _, records = reading.typical_prompt(comparison)
    everyone = reading.architectures(comparison)
    figure, (axes,) = style.new_figure(3.1)
    shown = []
    for name, record in records.items():
        times, tokens = arrivals(record)
        of = style.look(name, everyone)
        axes.plot(
            [0, *times], [0, *tokens], color=of.color, drawstyle="steps-post", linewidth=1.5,
            marker=of.marker, markevery=[len(tokens)], markeredgecolor=style.PAPER, clip_on=False, zorder=3,
        )  # fmt: skip
        for at, count in zip(times, tokens, strict=False):
            hover.point(axes, at, count, f"{fmt.name(name)}: {fmt.plural(count, 'token')} after {at:.2f} s")
        shown.append((times[-1], name, tokens[-1]))
    axes.set_xlim(0, 1.03 * max(at for at, _, _ in shown))
    axes.set_ylim(0, 1.06 * max(count for _, _, count in shown))
    axes.set_xlabel("seconds since sending")
    axes.set_ylabel("tokens received")
    style.only_grid(axes, "y")
    handles = [  # in the order of finishing, in the corner under the slowest line
        style.handle(n, everyone, f"{fmt.name(n)}: {count} in {at:.2f} s") for at, n, count in sorted(shown)
    ]
    axes.legend(
        handles=handles, loc="lower right", borderpad=0.2, labelcolor=style.INK, frameon=True, facecolor=style.PAPER,
        edgecolor="none",
    )  # fmt: skip
    return figure


def arrivals(record: JSON) -> tuple[list[float], list[int]]:
    """Returns the arrival times of chunks in seconds, and the tokens received by then."""
    times = list(accumulate(record["chunk_gaps_s"] or [], initial=record["ttft_s"]))
    return times, list(accumulate(record["chunk_tokens"]))[: len(times)]


def drawable(comparison: JSON) -> list[Row]:
    """Returns the rows that have a throughput. Raises NothingToDraw."""
    rows = rows_of(comparison)
    if not rows:
        raise NothingToDraw("No load was measured (--concurrency, --rate).")
    rows = [row for row in rows if row.of[THROUGHPUT] and row.of["ttft_s"]["p50"] is not None]
    if not rows:
        raise NothingToDraw("No request under load completed.")
    return rows


@style.in_style()
def latency_by_throughput(comparison: JSON) -> Figure:
    """Draws a line for each architecture through its closed loops, and one through its open loops."""
    from matplotlib.lines import Line2D

    rows = drawable(comparison)
    everyone = list(dict.fromkeys(row.architecture for row in rows))
    figure, panels = style.new_figure(5.2, rows=2, sharex=True)
    for axes, (metric, label) in zip(panels, PANELS, strict=True):
        tops = [
            _line(axes, [row for row in rows if (row.architecture, row.is_open) == (name, is_open)], metric, everyone)
            for name in everyone
            for is_open in (False, True)
        ]
        axes.set_ylim(0, 1.12 * max(tops) or 1.0)
        axes.set_ylabel(label)
    panels[-1].set_xlim(0, 1.04 * max(float(row.of[THROUGHPUT]) for row in rows))
    panels[-1].set_xlabel("output tokens per second, all requests together")
    handles = [style.handle(name, everyone) for name in everyone]
    for load, is_open in zip(loads_of(rows), (False, True), strict=True):
        if load:
            fill = style.PAPER if is_open else style.QUIET
            handles.append(
                Line2D([], [], color=style.QUIET, linestyle=DASHED if is_open else "-", marker="o",
                       markerfacecolor=fill, markeredgecolor=style.QUIET, label=load)
            )  # fmt: skip
    style.legend_above(figure, min(3, len(handles)), handles, labelcolor=style.INK)
    return figure


def _line(axes: Axes, rows: list[Row], metric: str, everyone: list[str]) -> float:
    """Draws one line and returns its highest point. Open loops are dashed, with hollow markers."""
    medians = [(row, row.of[metric]["p50"]) for row in rows]
    known = [(row, float(row.of[THROUGHPUT]), 1000 * seconds) for row, seconds in medians if seconds is not None]
    points = [(x, y) for _, x, y in known]
    if not points:
        return 0.0
    for row, x, y in known:
        hover.point(axes, x, y, f"{fmt.name(row.architecture)}, {row.load}: {y:.0f} ms, {x:.0f} tokens/s")
    of, is_open = style.look(rows[0].architecture, everyone), rows[0].is_open
    axes.plot(
        *zip(*points, strict=True), color=of.color, marker=of.marker, clip_on=False, zorder=3,
        linestyle=DASHED if is_open else "-", markerfacecolor=style.PAPER if is_open else of.color,
        markeredgecolor=of.color if is_open else style.PAPER,
    )  # fmt: skip
    return max(y for _, y in points)


def loads_of(rows: list[Row]) -> tuple[str, str]:
    """Returns the closed and the open loops in words, each empty if there is none: '1, 4, 8 at once'."""
    users = dict.fromkeys(str(row.point["concurrency"]) for row in rows if not row.is_open)
    rates = dict.fromkeys(f"{row.point['rate']:g}" for row in rows if row.is_open)
    return f"{', '.join(users)} at once" if users else "", f"{', '.join(rates)} requests/s" if rates else ""
