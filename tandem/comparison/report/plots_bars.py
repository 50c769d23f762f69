"""Plots bars: speedup by workload, and milliseconds per token by cause."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tandem.comparison.report import formatting as fmt
from tandem.comparison.report import hover, reading, style
from tandem.comparison.report.reading import JSON, NothingToDraw

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STEP, BAR = 0.3, 0.26
NO_TIME = "No request completed that took any time."


def speedups(comparison: JSON) -> tuple[list[str], dict[str, dict[str, JSON]]]:
    """Returns the architectures and, by workload, the speedup of each under the base."""
    base, names = reading.base(comparison), reading.compared_with_baseline(comparison)
    found = {name: base["architectures"][name]["workloads"] for name in names}
    by_workload = {
        kind: {
            name: of[kind]
            for name, of in found.items()
            if kind in of and of[kind]["speedup_vs_autoregressive"] is not None
        }
        for kind in reading.workloads(base)
    }
    by_workload = {kind: of for kind, of in by_workload.items() if of}
    if not by_workload:
        raise NothingToDraw("Without plain decoding in the same run there is no speedup to show.")
    return [name for name in names if any(name in of for of in by_workload.values())], by_workload


@style.in_style()
def speedup_by_workload(comparison: JSON) -> Figure:
    """Draws a group of bars for each workload; plain decoding is the line at 1."""
    names, by_workload = speedups(comparison)
    group = STEP * len(names) + 0.25
    figure, (axes,) = style.new_figure(0.95 + 0.78 * group * len(by_workload))
    for i, name in enumerate(names):
        of = style.look(name, reading.architectures(comparison))
        rows = [(group * j + STEP * i, found[name]) for j, found in enumerate(by_workload.values()) if name in found]
        places, values = [place for place, _ in rows], [float(w["speedup_vs_autoregressive"]) for _, w in rows]
        axes.barh(
            places, values, BAR, color=of.color, hatch=of.hatch, edgecolor=style.PAPER, linewidth=0.4,
            label=fmt.name(name),
        )  # fmt: skip
        for value, (place, workload) in zip(values, rows, strict=True):
            low, high = workload["speedup_interval"] or (value, value)
            if high > low:
                for color, width in ((style.PAPER, 3.2), (style.INK, 1.2)):  # an outline keeps it legible on a dark bar
                    axes.plot([low, high], [place] * 2, color=color, linewidth=width, solid_capstyle="butt", zorder=3)
            style.value_label(axes, f"{value:.2f}", (max(high, value), place))
            said = fmt.with_interval(fmt.times(value), workload["speedup_interval"])
            hover.bar(axes, place, 0, value, BAR, f"{fmt.name(name)}: {said}")
    axes.axvline(1, color=style.INK, linewidth=1.2, zorder=4)
    middle = STEP * (len(names) - 1) / 2
    axes.set_yticks([group * j + middle for j in range(len(by_workload))], list(map(fmt.name, by_workload)))
    axes.set_ylim(group * len(by_workload) - 0.3, -0.3)
    axes.set_xlim(0, None)
    _finish(figure, axes, "speedup over plain decoding (1: no gain), 95 % interval", len(names), 1.4)
    return figure


def _finish(figure: Figure, axes: Axes, label: str, columns: int, spacing: float) -> None:
    axes.set_xlabel(label)
    style.only_grid(axes, "x")
    axes.spines["left"].set_visible(False)
    style.legend_above(figure, columns, columnspacing=spacing, handlelength=1.3)


@style.in_style()
def time_by_cause(comparison: JSON) -> Figure:
    """Draws a stacked bar for each architecture, grouped by round trip."""
    conditions = reading.links(comparison)
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
    if not bars:
        raise NothingToDraw(NO_TIME)
    figure, (axes,) = style.new_figure(0.95 + 0.235 * (max(places) + 1))
    left = [0.0] * len(bars)
    for cause in dict.fromkeys(cause for _, of in bars for cause in (*style.CAUSES, *of)):
        color, hatch = style.CAUSES.get(cause, ("#999999", "++++"))
        widths = [of.get(cause) or 0.0 for _, of in bars]
        if any(widths):
            axes.barh(
                places, widths, 0.74, left, color=color, hatch=hatch, edgecolor=style.PAPER, linewidth=0.6, label=cause
            )  # fmt: skip
            for place, start, width, (name, _) in zip(places, left, widths, bars, strict=True):
                if width:
                    hover.bar(axes, place, start, width, 0.74, f"{fmt.name(name)}, {cause}: {width:.2f} ms")
            left = [start + width for start, width in zip(left, widths, strict=True)]
    for place, total in zip(places, left, strict=True):
        style.value_label(axes, f"{total:.1f}", (total, place))
    for place, text in heads:
        axes.annotate(text, (0, place), (2, 0), textcoords="offset points", va="center", fontsize=9, weight="bold")
    axes.set_yticks(places, [fmt.name(name) for name, _ in bars])
    axes.set_ylim(max(places) + 0.6, min([*places, *(p for p, _ in heads)]) - 0.6)
    axes.set_xlim(0, 1.1 * max(left))
    _finish(figure, axes, "milliseconds per output token, end to end", 6, 1.0)
    return figure
