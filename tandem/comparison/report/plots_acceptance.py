"""Plots acceptance by position and workload, and by temperature and rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tandem.comparison.measuring.architectures import DISTRIBUTED
from tandem.comparison.report import formatting as fmt
from tandem.comparison.report import hover, reading, style
from tandem.comparison.report.reading import JSON, NothingToDraw

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TOP = 0.85
"""From this share on, a value is written below its point: above it is the panel's title."""
AGREEMENT, REJECTION, OTHER = (style.INK, "o", "-"), (style.QUIET, "s", (0, (4, 2))), (style.INK, "D", "-")
LONGEST_TITLE = 19


def acceptance_by_workload(comparison: JSON) -> tuple[str, dict[str, JSON]]:
    """Returns a speculating architecture and its workloads under the base."""
    name = reading.speculating(comparison)
    if name is None:
        raise NothingToDraw("No architecture drafted anything under the base condition.")
    found = reading.base(comparison)["architectures"][name]["workloads"]
    drafted = {kind: of for kind, of in found.items() if any(v is not None for v in of["acceptance_by_position"])}
    if not drafted:
        raise NothingToDraw(f"No draft of {name} was verified.")
    return name, drafted


@style.in_style()
def acceptance_by_position(comparison: JSON) -> Figure:
    """Draws a panel for each workload, with the others in grey."""
    name, found = acceptance_by_workload(comparison)
    of = style.look(name, reading.architectures(comparison))
    figure, drawn = style.panels(len(found), 3, 2.75, 1.6, ("position in the draft", "share accepted"), extra=0.55)
    for axes, (kind, workload) in zip(drawn, found.items(), strict=True):
        for other in found.values():
            axes.plot(*_points(other), color=style.RULE, linewidth=1.2, zorder=1)
        x, y = _points(workload)
        axes.plot(x, y, color=of.color, marker=of.marker, markeredgecolor=style.PAPER, zorder=3, clip_on=False)
        for at, value in zip(x, y, strict=True):
            hover.point(axes, at, value, f"position {at}: {fmt.percent(value)} accepted")
            if at in (x[0], x[-1]):
                style.value_label(axes, fmt.number(value), (at, value), (0, 6 if value < TOP else -6))
        title = fmt.name(kind)
        axes.set_title(title if len(title) <= LONGEST_TITLE else title[: LONGEST_TITLE - 1] + "…")
        style.only_grid(axes, "y")
    longest = max(len(workload["acceptance_by_position"]) for workload in found.values())
    drawn[0].set(xlim=(0.6, longest + 0.4), ylim=(0, 1), yticks=(0, 0.5, 1))
    drawn[0].set_xticks(range(1, longest + 1, max(1, longest // 6)))
    return figure


def _points(workload: JSON) -> tuple[list[int], list[float]]:
    pairs = [(i, float(v)) for i, v in enumerate(workload["acceptance_by_position"], 1) if v is not None]
    return [i for i, _ in pairs], [v for _, v in pairs]


def sampled_by_rule(comparison: JSON) -> tuple[str, dict[str, list[tuple[float, JSON]]]]:
    """Returns the architecture whose traffic shows the rules' difference, and its (temperature, figures) by rule."""
    conditions = reading.samplings(comparison)
    if not conditions:
        raise NothingToDraw("Only one sampling setting was measured: there is nothing to compare.")
    drafting = reading.drafting(reading.base(comparison)) or reading.drafting(conditions[-1])
    if not drafting:
        raise NothingToDraw("No architecture drafted anything.")
    name = DISTRIBUTED.name if DISTRIBUTED.name in drafting else drafting[0]
    by_rule: dict[str, list[tuple[float, JSON]]] = {}
    for condition in conditions:
        if of := condition["architectures"].get(name):
            by_rule.setdefault(condition["rule"], []).append((float(condition["sampling"]["temperature"]), of))
    return name, by_rule


def known(
    by_rule: dict[str, list[tuple[float, JSON]]], value: Callable[[JSON], float | None]
) -> dict[str, list[tuple[float, float]]]:
    """Returns (temperature, value) pairs of each rule that has any."""
    found = {rule: [(t, y) for t, of in each if (y := value(of)) is not None] for rule, each in by_rule.items()}
    return {rule: points for rule, points in found.items() if points}


def acceptance_rate(of: JSON) -> float | None:
    rate: float | None = of["acceptance_rate"]
    return rate


def bytes_per_token(of: JSON) -> float | None:
    """Returns the bytes per token, both ways."""
    up, down = of["bytes_up_per_token"], of["bytes_down_per_token"]
    return None if up is None or down is None else up + down


@style.in_style()
def acceptance_by_temperature(comparison: JSON) -> Figure:
    """Draws acceptance rate and bytes per token, with one line for each rule."""
    _, by_rule = sampled_by_rule(comparison)
    height = 4.6
    figure, (upper, lower) = style.new_figure(height, 2, 1, sharex=True)
    rates, sent = known(by_rule, acceptance_rate), known(by_rule, bytes_per_token)
    intervals = [  # shifted by rule, so that they do not overlap
        (rule, t + 0.006 * (2 * side - 1), interval)
        for side, (rule, each) in enumerate(by_rule.items())
        for t, of in each
        if (interval := of.get("acceptance_interval"))
    ]
    tops = [*(y for line in rates.values() for _, y in line), *(high for _, _, (_, high) in intervals)]
    upper.set_title("acceptance rate (thin lines: 95 % interval over prompts)")
    upper.set_ylim(0, 1.06 * max(tops, default=1.0))
    sizes = [y for line in sent.values() for _, y in line if y]
    logarithmic = bool(sizes) and max(sizes) > 8 * min(sizes)
    lower.set_title("bytes per token, both ways" + (" (log scale)" if logarithmic else ""))
    if logarithmic:
        lower.set(yscale="log", ylim=(min(sizes) / 1.6, max(sizes) * 1.6))
        lower.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        lower.minorticks_off()
    else:
        lower.set_ylim(0, 1.12 * max(sizes, default=1.0))
    temperatures = sorted({t for each in by_rule.values() for t, _ in each})
    lower.set_xticks(temperatures, [f"{t:g}" for t in temperatures])
    lower.set_xlabel("temperature (0: greedy)")
    for rule, at, interval in intervals:
        upper.plot((at, at), interval, color=_look(rule)[0], linewidth=1.2, zorder=2)
    for axes, lines, unit in ((upper, rates, ""), (lower, sent, " bytes")):
        for rule, points in lines.items():
            color, marker, line = _look(rule)
            for temperature, value in points:
                hover.point(axes, temperature, value, f"{rule}, temperature {temperature:g}: {value:.3g}{unit}")
            axes.plot(
                *zip(*points, strict=True), color=color, marker=marker, linestyle=line, markeredgecolor=style.PAPER,
                clip_on=False, zorder=3,
            )  # fmt: skip
        axes.margins(x=0.04)
        style.only_grid(axes, "y")
        ends = [(points[-1][1], rule, _look(rule)[0]) for rule, points in lines.items()]
        style.label_lines(axes, ends, height * 0.33)
    return figure


def _look(rule: str) -> tuple[str, str, Any]:
    return {"agreement": AGREEMENT, "rejection": REJECTION}.get(rule, OTHER)
