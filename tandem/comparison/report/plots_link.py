"""Plots TPOT against RTT, TPOT on each link, and predicted TPOT by speculation length."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from tandem.comparison.report import formatting as fmt
from tandem.comparison.report import hover, reading, style
from tandem.comparison.report.reading import JSON, NothingToDraw

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ONE_POINT = "Only one round trip was measured and nothing was predicted; see the tables."
SEVERAL_LINKS = "Several links have the same round trip; see the tables."
ONE_LINK = "Only one link was measured; see the tables."
HEIGHT = 3.4
TITLE_WIDTH = 48
"""Characters of a strip's title in a line."""
WIDE = 8
"""How many times the least time the most is where an axis of times is logarithmic."""


@style.in_style()
def tpot_by_rtt(comparison: JSON) -> Figure:
    """Draws measured points with intervals, predicted curves, and the break-even of distributed and plain decoding."""
    from matplotlib.transforms import ScaledTranslation

    conditions, everyone, theory = reading.links(comparison), reading.architectures(comparison), comparison["theory"]
    curve = theory["curve"] if theory else []
    rtts = [float(c["link"]["rtt_ms"]) for c in conditions]
    if not curve and len(set(rtts)) < 2:
        raise NothingToDraw(ONE_POINT)
    if reading.same_round_trip(conditions):
        raise NothingToDraw(SEVERAL_LINKS)
    right = max([*rtts, *(point["rtt_ms"] for point in curve)])
    figure, (axes,) = style.new_figure(HEIGHT)
    ends: list[tuple[float, str, str]] = []
    top, missed = 0.0, reading.missed(comparison)
    names = list(dict.fromkeys([*everyone, *(n for point in curve for n in point["tpot_s"])]))
    for i, name in enumerate(names):
        of = style.look(name, [*everyone, "pipelined"])
        predicted = [(p["rtt_ms"], 1000 * p["tpot_s"][name]) for p in curve if name in p["tpot_s"]]
        measured = [point for c in conditions if (point := _measured(c, name))]
        if predicted and name not in missed:
            axes.plot(*zip(*predicted, strict=True), color=of.color, linestyle=(0, (4, 2)) if not measured else "-")
        elif predicted:  # what was measured is the line, and the prediction is struck out beside it
            axes.plot(*zip(*predicted, strict=True), color=of.color, linestyle=(0, (1, 2)), linewidth=1, alpha=0.7)
            _strike_out(axes, missed[name], of.color)
            axes.plot([x for x, *_ in measured], [y for _, y, *_ in measured], color=of.color)
        for at, value, less, more in measured:
            tpot = fmt.with_interval(f"{value:.2f} ms a token", (value - less, value + more) if less or more else None)
            hover.point(axes, at, value, f"{fmt.name(name)} at {at:g} ms: {tpot}, measured")
        if measured:
            x, y, below, above = zip(*measured, strict=True)
            aside = ScaledTranslation(2.5 * (i - (len(names) - 1) / 2) / 72, 0, figure.dpi_scale_trans)
            axes.errorbar(  # 2.5 points apart, so that points at the same round trip do not overlap
                x, y, [below, above], color=of.color, fmt=of.marker, linestyle="" if predicted else ":",
                markeredgecolor=style.PAPER, markeredgewidth=0.8, elinewidth=1.2, capsize=0, zorder=3, clip_on=False,
                transform=axes.transData + aside,
            )  # fmt: skip
        top = max([top, *(y for _, y in predicted), *(y + above for _, y, _, above in measured)])
        if predicted or measured:
            last = (measured if name in missed else predicted or measured)[-1][1]
            ends.append((last, fmt.name(name), of.color))
    axes.set_xlim(-0.05 * right, 1.03 * right)
    axes.set_ylim(0, 1.05 * top)
    if theory:
        _break_even(axes, theory, right)
    ticks: list[float] = []
    for rtt in sorted(set(rtts)):  # those that are far enough apart
        if not ticks or rtt - ticks[-1] >= 0.07 * right:
            ticks.append(rtt)
    if len(ticks) > 1:
        axes.set_xticks(ticks, [f"{rtt:g}" for rtt in ticks])
    emulated = " (emulated)" if any(c["link"]["kind"] != "direct" for c in conditions) else ""
    axes.set_xlabel(f"round trip between the sides{emulated}, ms")
    axes.set_ylabel("time per output token, ms")
    style.only_grid(axes, "y")
    style.label_lines(axes, ends, HEIGHT * 0.74)
    return figure


def _strike_out(axes: Axes, missed: list[JSON], color: str) -> None:
    """Draws a cross where each missed prediction is, and a thin line from there to what was measured."""
    for prediction in missed:
        at, said = prediction["rtt_ms"], 1000 * prediction["predicted_tpot_s"]
        axes.plot([at, at], [said, 1000 * prediction["measured_tpot_s"]], color=color, linewidth=0.8, zorder=2)
        axes.plot([at], [said], "x", color=color, markersize=7, markeredgewidth=1.8, zorder=4, clip_on=False)
        error = fmt.percent(prediction["error"], sign=True)
        hover.point(
            axes, at, said, f"{fmt.name(prediction['architecture'])}: {said:.2f} ms predicted, missed by {error}"
        )


def _measured(condition: JSON, name: str) -> tuple[float, float, float, float] | None:
    """Returns (RTT, TPOT, error below, error above) in milliseconds."""
    mean = reading.mean_tpot(condition, name)
    if mean is None:
        return None
    low, high = condition["architectures"][name]["tpot_interval"] or (mean, mean)
    return (
        float(condition["link"]["rtt_ms"]), 1000 * mean, 1000 * max(0.0, mean - low), 1000 * max(0.0, high - mean)
    )  # fmt: skip


def _break_even(axes: Axes, theory: JSON, right: float) -> None:
    even, spread, seen = (
        theory[key] for key in ("break_even_rtt_s", "break_even_interval_s", "measured_break_even_rtt_s")
    )
    said: list[str] = []
    at = seen if seen is not None else even
    if even is not None and 0 < 1000 * even <= right:
        if spread:
            low, high = 1000 * max(0.0, spread[0]), min(right, 1000 * spread[1])
            axes.axvspan(low, high, color=style.BAND, linewidth=0, zorder=0)
        axes.axvline(1000 * even, color=style.INK, linewidth=0.9, zorder=1)
        said.append(fmt.with_interval(f"{1000 * even:.0f} predicted", spread, 1000, 0))
        at = even
    if seen is not None and 1000 * seen <= right:
        axes.axvline(1000 * seen, color=style.INK, linewidth=0.9, linestyle=(0, (1, 2)), zorder=1)
        said.append(f"{1000 * seen:.0f} measured")
    if said:
        share = (1000 * at / right + 0.05) / 1.08
        align, shift = ("left", -6) if share < 0.35 else ("right", 6) if share > 0.65 else ("center", 0)
        axes.annotate(
            f"break-even, ms: {', '.join(said)}", (share, 1), (shift, 5), xycoords="axes fraction",
            textcoords="offset points", ha=align, fontsize=9, annotation_clip=False,
        )  # fmt: skip


def several_links(comparison: JSON) -> list[JSON]:
    """Returns the links on which anything took any time. Raises NothingToDraw if there is one at most."""
    found = [c for c in reading.links(comparison) if any(reading.mean_tpot(c, name) for name in c["architectures"])]
    if len(found) < 2:
        raise NothingToDraw(ONE_LINK)
    return found


@style.in_style()
def tpot_by_link(comparison: JSON) -> Figure:
    """Draws a strip for each link: a row for each architecture, with a dot for each request, and the mean."""
    conditions, everyone = several_links(comparison), reading.architectures(comparison)
    dots = _request_times(comparison)
    times = [1000 * seconds for each in dots.values() for seconds in each]
    titles = [textwrap.fill(f"RTT {fmt.rtt(c['link'])}", TITLE_WIDTH) for c in conditions]
    lines = sum(title.count("\n") for title in titles)
    height = sum(0.36 + 0.17 * len(c["architectures"]) for c in conditions) + 0.16 * lines + 0.9
    ratios = [1 + len(c["architectures"]) for c in conditions]
    figure, strips = style.new_figure(height, rows=len(conditions), sharex=True, height_ratios=ratios)
    for axes, condition, title in zip(strips, conditions, titles, strict=True):
        found = [(name, point) for name in everyone if (point := _measured(condition, name))]
        for place, (name, (_, mean, less, more)) in enumerate(found):
            of, each = style.look(name, everyone), dots.get((condition["name"], name), [])
            times += [mean - less, mean + more]
            axes.plot(
                [1000 * seconds for seconds in each], [place] * len(each), "|", color=of.color, alpha=0.45,
                markersize=6, zorder=2,
            )  # fmt: skip
            axes.errorbar(
                mean, place, xerr=[[less], [more]], color=of.color, fmt=of.marker, markeredgecolor=style.PAPER,
                markeredgewidth=0.8, elinewidth=1.2, zorder=3, clip_on=False,
            )  # fmt: skip
            tpot = fmt.with_interval(f"{mean:.1f} ms a token", (mean - less, mean + more), digits=1)
            hover.point(axes, mean, place, f"{fmt.name(name)}: {tpot}")
        axes.set_title(title)
        axes.set_yticks([])
        axes.set_ylim(len(found) - 0.4, -0.6)
        axes.spines["left"].set_visible(False)
        style.only_grid(axes, "x")
    low, high = max(min(times), 1e-3), max(times)
    if high > WIDE * low:
        strips[0].set(xscale="log", xlim=(low / 1.2, high * 1.2))
        strips[0].xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    else:
        strips[0].set_xlim(0, 1.04 * high)
    strips[-1].set_xlabel("time per output token, ms" + (" (log scale)" if high > WIDE * low else ""))
    style.legend_above(figure, min(3, len(everyone)), [style.handle(name, everyone) for name in everyone])
    return figure


def _request_times(comparison: JSON) -> dict[tuple[str, str], list[float]]:
    """Returns the seconds per token of every request, by condition and architecture."""
    found: dict[tuple[str, str], list[float]] = {}
    for record in comparison["records"]:
        if not record["error"] and record["tpot_s"]:
            found.setdefault((record["condition"], record["architecture"]), []).append(record["tpot_s"])
    return found


@style.in_style()
def tpot_by_length(comparison: JSON) -> Figure:
    """Draws predicted TPOT over speculation lengths for each round trip, marking the best and the measured one."""
    from matplotlib.lines import Line2D

    theory, everyone = comparison["theory"], reading.architectures(comparison)
    if not theory or not theory["best_lengths"]:
        raise NothingToDraw("Nothing was predicted.")
    rtts = sorted({best["rtt_ms"] for best in theory["best_lengths"]})
    conditions = {float(c["link"]["rtt_ms"]): c for c in reversed(reading.links(comparison))}
    labels = ("speculation length (0: plain decoding)", "time per output token, ms")
    figure, drawn = style.panels(len(rtts), 2, 3.15, 1.75, labels, extra=0.75)
    top = 0.0
    for axes, rtt in zip(drawn, rtts, strict=True):
        if theory["length"] is not None:
            axes.axvline(theory["length"], color=style.QUIET, linewidth=0.8, linestyle=(0, (1, 2)), zorder=1)
        for best in (b for b in theory["best_lengths"] if b["rtt_ms"] == rtt):
            of, tpots = style.look(best["architecture"], everyone), [1000 * s for s in best["tpot_s_by_length"]]
            top = max(top, tpots[0] * 2, *tpots[1:3])
            axes.plot(range(len(tpots)), tpots, color=of.color, linewidth=1.5)
            for length, tpot in enumerate(tpots):
                hover.point(axes, length, tpot, f"{fmt.name(best['architecture'])}, {length}: {tpot:.1f} ms predicted")
            axes.plot(
                [best["length"]], [1000 * best["tpot_s"]], "o", color="none", markeredgecolor=of.color,
                markeredgewidth=1.6, markersize=7.5, zorder=3, clip_on=False,
            )  # fmt: skip
            mean = reading.mean_tpot(conditions[rtt], best["architecture"]) if rtt in conditions else None
            if mean is not None:
                ran = theory["length"]
                if ran is None:
                    ran = conditions[rtt]["architectures"][best["architecture"]]["mean_draft_length"] or 0.0
                said = f"{fmt.name(best['architecture'])}, {ran:.3g}: {1000 * mean:.1f} ms measured"
                hover.point(axes, ran, 1000 * mean, said)
                axes.plot(
                    [ran], [1000 * mean], of.marker, color=of.color, markeredgecolor=style.PAPER,
                    markersize=6, zorder=4,
                )  # fmt: skip
        link = conditions[rtt]["link"] if rtt in conditions else {"kind": "emulated", "rtt_ms": rtt}
        axes.set_title(f"RTT {fmt.rtt(link)}")
        style.only_grid(axes, "y")
    longest = max(len(b["tpot_s_by_length"]) for b in theory["best_lengths"]) - 1
    drawn[0].set(xlim=(0, longest), ylim=(0, top))
    drawn[0].set_xticks(range(0, longest + 1, max(1, longest // 4)))
    handles = [style.handle(n, everyone) for n in dict.fromkeys(b["architecture"] for b in theory["best_lengths"])]
    ring = style.INK
    handles.append(
        Line2D([], [], linestyle="", marker="o", color="none", markeredgecolor=ring, markeredgewidth=1.4, label="least")
    )
    style.legend_above(figure, len(handles), handles)
    return figure
