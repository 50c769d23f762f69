"""Plots milliseconds per token by cause, and the arrival of one prompt's tokens."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from tandem.comparison.report import formatting as fmt
from tandem.comparison.report import reading
from tandem.comparison.report.reading import JSON, NothingToDraw
from tandem.comparison.report.style import (
    CAUSES,
    INK,
    PAPER,
    look,
    new_figure,
    only_grid,
    styled,
    title_of,
    value_label,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@styled
def time_by_cause(comparison: JSON) -> Figure:
    """Draws a stacked bar for each architecture, grouped by round trip."""
    conditions = reading.links(comparison)
    places, bars, heads = _rows(conditions)
    if not bars:
        raise NothingToDraw("No request completed that took any time.")
    figure, (axes,) = new_figure(0.95 + 0.235 * (max(places) + 1))
    left = [0.0] * len(bars)
    causes = list(dict.fromkeys(cause for _, of in bars for cause in (*CAUSES, *of)))
    for cause in causes:
        color, hatch = CAUSES.get(cause, ("#999999", "++++"))
        widths = [of.get(cause) or 0.0 for _, of in bars]
        if not any(widths):
            continue
        axes.barh(
            places, widths, 0.74, left, color=color, hatch=hatch, edgecolor=PAPER, linewidth=0.6, label=cause
        )  # fmt: skip
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for place, total in zip(places, left, strict=True):
        value_label(axes, f"{total:.1f}", (total, place))
    for place, text in heads:
        axes.annotate(text, (0, place), (2, 0), textcoords="offset points", va="center", fontsize=9, weight="bold")
    axes.set_yticks(places, [title_of(name) for name, _ in bars])
    axes.set_ylim(max(places) + 0.6, min([*places, *(p for p, _ in heads)]) - 0.6)
    axes.set_xlim(0, 1.1 * max(left))
    axes.set_xlabel("milliseconds per output token, end to end")
    only_grid(axes, "x")
    axes.spines["left"].set_visible(False)
    figure.legend(loc="outside upper left", ncols=6, columnspacing=1.0, handlelength=1.3, borderpad=0)
    return figure


def _rows(conditions: list[JSON]) -> tuple[list[float], list[tuple[str, JSON]], list[tuple[float, str]]]:
    """Returns the positions of bars, the bars, and the headings of groups if there are several."""
    places: list[float] = []
    bars: list[tuple[str, JSON]] = []
    heads: list[tuple[float, str]] = []
    row = 0.0
    for condition in conditions:
        if len(conditions) > 1:
            heads.append((row, f"RTT {fmt.rtt(condition['link'])}"))
            row += 0.95
        for name, of in condition["architectures"].items():
            if of["milliseconds_per_token"].get("verify") is not None:
                places.append(row)
                bars.append((name, of["milliseconds_per_token"]))
                row += 1
        row += 0.35
    return places, bars, heads


@styled
def tokens_over_time(comparison: JSON) -> Figure:
    """Draws one prompt of the base in every architecture, with a step for every chunk."""
    _, _, records = reading.typical_prompt(comparison)
    everyone = reading.architectures(comparison)
    figure, (axes,) = new_figure(3.1)
    shown = []
    for name, record in records.items():
        times, tokens = arrivals(record)
        of = look(name, everyone)
        axes.plot(
            [0, *times], [0, *tokens], color=of.color, drawstyle="steps-post", linewidth=1.5,
            marker=of.marker, markevery=[len(tokens)], markeredgecolor=PAPER, clip_on=False, zorder=3,
        )  # fmt: skip
        shown.append((times[-1], name, tokens[-1]))
    axes.set_xlim(0, 1.03 * max(at for at, _, _ in shown))
    axes.set_ylim(0, 1.06 * max(count for _, _, count in shown))
    axes.set_xlabel("seconds since sending")
    axes.set_ylabel("tokens received")
    only_grid(axes, "y")
    _finish_times(axes, sorted(shown), everyone)
    return figure


def arrivals(record: JSON) -> tuple[list[float], list[int]]:
    """Returns the arrival times of chunks in seconds, and the tokens received by then."""
    times = list(accumulate(record["chunk_gaps_s"] or [], initial=record["ttft_s"]))
    return times, list(accumulate(record["chunk_tokens"]))[: len(times)]


def _finish_times(axes: Axes, shown: list[tuple[float, str, int]], everyone: list[str]) -> None:
    """Draws a legend in the order of finishing, in the corner under the slowest line."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=look(name, everyone).color, marker=look(name, everyone).marker, markeredgecolor=PAPER,
               label=f"{title_of(name)}: {count} in {at:.2f} s")
        for at, name, count in shown
    ]  # fmt: skip
    axes.legend(
        handles=handles,
        loc="lower right",
        borderpad=0.2,
        labelcolor=INK,
        frameon=True,
        facecolor=PAPER,
        edgecolor="none",
    )
