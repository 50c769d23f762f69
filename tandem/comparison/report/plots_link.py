"""Plots TPOT against RTT, and predicted TPOT by speculation length."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tandem.comparison.report import formatting as fmt
from tandem.comparison.report import reading
from tandem.comparison.report.reading import JSON, NothingToDraw
from tandem.comparison.report.style import (
    BAND,
    INK,
    PAPER,
    QUIET,
    label_lines,
    look,
    new_figure,
    only_grid,
    side_label,
    styled,
    title_of,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.transforms import Transform

PIPELINED = "pipelined"


@styled
def tpot_by_rtt(comparison: JSON) -> Figure:
    """Draws measured points with intervals, predicted curves, and the break-even of distributed and plain decoding."""
    conditions, everyone = reading.links(comparison), reading.architectures(comparison)
    curve = comparison["theory"]["curve"] if comparison["theory"] else []
    rtts = [float(c["link"]["rtt_ms"]) for c in conditions]
    if not curve and len(set(rtts)) < 2:
        raise NothingToDraw("Only one round trip was measured and nothing was predicted; see the tables.")
    right = max([*rtts, *(point["rtt_ms"] for point in curve)])
    height = 3.4
    figure, (axes,) = new_figure(height)
    ends: list[tuple[float, str, str]] = []
    top = 0.0
    names = list(dict.fromkeys([*everyone, *(n for point in curve for n in point["tpot_s"])]))
    for i, name in enumerate(names):
        of = look(name, [*everyone, PIPELINED])
        predicted = [(p["rtt_ms"], 1000 * p["tpot_s"][name]) for p in curve if name in p["tpot_s"]]
        measured = [point for c in conditions if (point := _measured(c, name))]
        if predicted:
            axes.plot(*zip(*predicted, strict=True), color=of.color, linestyle=(0, (4, 2)) if not measured else "-")
        if measured:
            x, y, below, above = zip(*measured, strict=True)
            line = "" if predicted else ":"
            axes.errorbar(
                x, y, [below, above], color=of.color, fmt=of.marker, linestyle=line, markeredgecolor=PAPER,
                markeredgewidth=0.8, elinewidth=1.2, capsize=0, zorder=3, clip_on=False,
                transform=axes.transData + _aside(figure, i - (len(names) - 1) / 2),
            )  # fmt: skip
        top = max([top, *(y for _, y in predicted), *(y + above for _, y, _, above in measured)])
        if predicted or measured:
            last = predicted[-1][1] if predicted else measured[-1][1]
            ends.append((last, title_of(name), of.color))
    axes.set_xlim(-0.05 * right, 1.03 * right)
    axes.set_ylim(0, 1.05 * top)
    if comparison["theory"]:
        _break_even(axes, comparison["theory"], right)
    _ticks(axes, rtts, right)
    emulated = " (emulated)" if reading.emulated(conditions) else ""
    axes.set_xlabel(f"round trip between the sides{emulated}, ms")
    axes.set_ylabel("time per output token, ms")
    only_grid(axes, "y")
    label_lines(axes, ends, height * 0.74)
    return figure


def _aside(figure: Figure, steps: float) -> Transform:
    """Returns a shift of 2.5 points per step, so that points at the same round trip do not overlap."""
    from matplotlib.transforms import ScaledTranslation

    return ScaledTranslation(2.5 * steps / 72, 0, figure.dpi_scale_trans)


def _measured(condition: JSON, name: str) -> tuple[float, float, float, float] | None:
    """Returns (RTT, TPOT, error below, error above) in milliseconds."""
    mean = reading.mean_tpot(condition, name)
    if mean is None:
        return None
    low, high = condition["architectures"][name]["tpot_interval"] or (mean, mean)
    return (
        float(condition["link"]["rtt_ms"]), 1000 * mean, 1000 * max(0.0, mean - low), 1000 * max(0.0, high - mean)
    )  # fmt: skip


def _ticks(axes: Axes, rtts: list[float], right: float) -> None:
    """Puts ticks at the measured round trips that are far enough apart."""
    kept: list[float] = []
    for rtt in sorted(set(rtts)):
        if not kept or rtt - kept[-1] >= 0.07 * right:
            kept.append(rtt)
    if len(kept) > 1:
        axes.set_xticks(kept, [f"{rtt:g}" for rtt in kept])


def _break_even(axes: Axes, theory: JSON, right: float) -> None:
    even, spread, seen = (
        theory[key] for key in ("break_even_rtt_s", "break_even_interval_s", "measured_break_even_rtt_s")
    )
    said: list[str] = []
    at = seen if seen is not None else even
    if even is not None and 0 < 1000 * even <= right:
        if spread:
            axes.axvspan(1000 * max(0.0, spread[0]), min(right, 1000 * spread[1]), color=BAND, linewidth=0, zorder=0)
        axes.axvline(1000 * even, color=INK, linewidth=0.9, zorder=1)
        said.append(fmt.with_interval(f"{1000 * even:.0f} predicted", spread, 1000, 0))
        at = even
    if seen is not None and 1000 * seen <= right:
        axes.axvline(1000 * seen, color=INK, linewidth=0.9, linestyle=(0, (1, 2)), zorder=1)
        said.append(f"{1000 * seen:.0f} measured")
    if said:
        share = (1000 * at / right + 0.05) / 1.08
        align = "left" if share < 0.35 else "right" if share > 0.65 else "center"
        shift = {"left": -6, "right": 6}.get(align, 0)
        axes.annotate(
            f"break-even, ms: {', '.join(said)}",
            xy=(share, 1),
            xytext=(shift, 5),
            xycoords="axes fraction",
            textcoords="offset points",
            ha=align,
            fontsize=9,
            annotation_clip=False,
        )


@styled
def tpot_by_length(comparison: JSON) -> Figure:
    """Draws predicted TPOT over speculation lengths for each round trip, marking the best and the measured one."""
    theory = comparison["theory"]
    if not theory or not theory["best_lengths"]:
        raise NothingToDraw("Nothing was predicted.")
    rtts = sorted({best["rtt_ms"] for best in theory["best_lengths"]})
    conditions = {float(c["link"]["rtt_ms"]): c for c in reversed(reading.links(comparison))}
    everyone = reading.architectures(comparison)
    columns = min(2, len(rtts))
    rows = -(-len(rtts) // columns)
    figure, panels = new_figure(0.75 + (2.4 if rows == 1 else 1.75 * rows), rows, columns, sharex=True, sharey=True)
    top = 0.0
    for axes, rtt in zip(panels, rtts, strict=False):
        axes.axvline(theory["length"], color=QUIET, linewidth=0.8, linestyle=(0, (1, 2)), zorder=1)
        for best in (b for b in theory["best_lengths"] if b["rtt_ms"] == rtt):
            of, tpots = look(best["architecture"], everyone), [1000 * s for s in best["tpot_s_by_length"]]
            top = max(top, tpots[0] * 2, *tpots[1:3])
            axes.plot(range(len(tpots)), tpots, color=of.color, linewidth=1.5)
            axes.plot(
                [best["length"]], [1000 * best["tpot_s"]], "o", color="none", markeredgecolor=of.color,
                markeredgewidth=1.6, markersize=7.5, zorder=3, clip_on=False,
            )  # fmt: skip
            mean = reading.mean_tpot(conditions[rtt], best["architecture"]) if rtt in conditions else None
            if mean is not None:
                axes.plot(
                    [theory["length"]], [1000 * mean], of.marker, color=of.color, markeredgecolor=PAPER,
                    markersize=6, zorder=4,
                )  # fmt: skip
        link = conditions[rtt]["link"] if rtt in conditions else {"kind": "emulated", "rtt_ms": rtt}
        axes.set_title(f"RTT {fmt.rtt(link)}")
        only_grid(axes, "y")
    for axes in panels[len(rtts) :]:
        axes.set_visible(False)
    panels[0].set_ylim(0, top)
    longest = max(len(b["tpot_s_by_length"]) for b in theory["best_lengths"]) - 1
    panels[0].set_xlim(0, longest)
    panels[0].set_xticks(range(0, longest + 1, max(1, longest // 4)))
    figure.supxlabel("speculation length (0: plain decoding)", fontsize=9.5)
    side_label(figure, "time per output token, ms")
    _length_legend(figure, comparison)
    return figure


def _length_legend(figure: Figure, comparison: JSON) -> None:
    from matplotlib.lines import Line2D

    everyone = reading.architectures(comparison)
    names = dict.fromkeys(b["architecture"] for b in comparison["theory"]["best_lengths"])
    handles = [
        Line2D([], [], color=look(n, everyone).color, marker=look(n, everyone).marker, markeredgecolor=PAPER,
               label=title_of(n))
        for n in names
    ]  # fmt: skip
    handles.append(
        Line2D([], [], linestyle="", marker="o", color="none", markeredgecolor=INK, markeredgewidth=1.4, label="least")
    )
    figure.legend(handles=handles, loc="outside upper left", ncols=len(handles), columnspacing=1.2, borderpad=0)
