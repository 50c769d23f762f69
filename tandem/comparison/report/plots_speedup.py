"""Plots speedup by workload."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tandem.comparison.report import reading
from tandem.comparison.report.reading import JSON, NothingToDraw
from tandem.comparison.report.style import INK, PAPER, look, new_figure, only_grid, styled, title_of, value_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STEP, BAR = 0.3, 0.26


def speedups(comparison: JSON) -> tuple[list[str], dict[str, dict[str, JSON]]]:
    """Returns the architectures and, by workload, the speedup of each under the base."""
    names = reading.compared_with_baseline(comparison)
    found = reading.base(comparison)["architectures"]
    by_workload = {
        kind: {
            name: found[name]["workloads"][kind]
            for name in names
            if kind in found[name]["workloads"]
            and found[name]["workloads"][kind]["speedup_vs_autoregressive"] is not None
        }
        for kind in reading.workloads(reading.base(comparison))
    }
    by_workload = {kind: of for kind, of in by_workload.items() if of}
    if not by_workload:
        raise NothingToDraw("Without plain decoding in the same run there is no speedup to show.")
    return [name for name in names if any(name in of for of in by_workload.values())], by_workload


@styled
def speedup_by_workload(comparison: JSON) -> Figure:
    """Draws a group of bars for each workload; plain decoding is the line at 1."""
    names, by_workload = speedups(comparison)
    everyone = reading.architectures(comparison)
    group = STEP * len(names) + 0.25
    figure, (axes,) = new_figure(0.95 + 0.78 * group * len(by_workload))
    for i, name in enumerate(names):
        rows = [(group * j + STEP * i, of[name]) for j, of in enumerate(by_workload.values()) if name in of]
        _bars(axes, rows, name, everyone)
    axes.axvline(1, color=INK, linewidth=1.2, zorder=4)
    middle = STEP * (len(names) - 1) / 2
    axes.set_yticks(
        [group * j + middle for j in range(len(by_workload))], [kind.replace("_", " ") for kind in by_workload]
    )
    axes.set_ylim(group * len(by_workload) - 0.3, -0.3)
    axes.set_xlim(0, None)
    axes.set_xlabel("speedup over plain decoding (1: no gain), 95 % interval")
    only_grid(axes, "x")
    axes.spines["left"].set_visible(False)
    figure.legend(loc="outside upper left", ncols=len(names), columnspacing=1.4, handlelength=1.3, borderpad=0)
    return figure


def _bars(axes: Axes, rows: list[tuple[float, JSON]], name: str, everyone: list[str]) -> None:
    of = look(name, everyone)
    places = [place for place, _ in rows]
    values = [float(workload["speedup_vs_autoregressive"]) for _, workload in rows]
    axes.barh(
        places, values, BAR, color=of.color, hatch=of.hatch, edgecolor=PAPER, linewidth=0.4, label=title_of(name)
    )  # fmt: skip
    for place, value, (_, workload) in zip(places, values, rows, strict=True):
        low, high = workload["speedup_interval"] or (value, value)
        if high > low:
            for color, width in ((PAPER, 3.2), (INK, 1.2)):  # an outline keeps it legible on a dark bar
                axes.plot([low, high], [place, place], color=color, linewidth=width, solid_capstyle="butt", zorder=3)
        value_label(axes, f"{value:.2f}", (max(high, value), place))
