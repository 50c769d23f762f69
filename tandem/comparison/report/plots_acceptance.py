"""Plots acceptance by position and workload, and by temperature and rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tandem.comparison.report import reading
from tandem.comparison.report.formatting import number
from tandem.comparison.report.reading import JSON, NothingToDraw
from tandem.comparison.report.style import (
    INK,
    PAPER,
    QUIET,
    RULE,
    label_lines,
    look,
    new_figure,
    only_grid,
    side_label,
    styled,
    value_label,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TOP = 0.85
"""From this share on, a value is written below its point: above it is the panel's title."""
RULES: dict[str, tuple[str, str, Any]] = {"agreement": (INK, "o", "-"), "rejection": (QUIET, "s", (0, (4, 2)))}


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


@styled
def acceptance_by_position(comparison: JSON) -> Figure:
    """Draws a panel for each workload, with the others in grey."""
    name, found = acceptance_by_workload(comparison)
    of = look(name, reading.architectures(comparison))
    columns = min(3, len(found))
    rows = -(-len(found) // columns)
    figure, panels = new_figure(0.55 + (2.2 if rows == 1 else 1.6 * rows), rows, columns, sharex=True, sharey=True)
    for axes, (kind, workload) in zip(panels, found.items(), strict=False):
        for other in found.values():
            axes.plot(*_points(other), color=RULE, linewidth=1.2, zorder=1)
        x, y = _points(workload)
        axes.plot(x, y, color=of.color, marker=of.marker, markeredgecolor=PAPER, zorder=3, clip_on=False)
        for at, value in zip(x, y, strict=True):
            if at in (x[0], x[-1]):
                value_label(axes, number(value), (at, value), (0, 6 if value < TOP else -6))
        axes.set_title(_short(kind.replace("_", " ")))
        only_grid(axes, "y")
    for axes in panels[len(found) :]:
        axes.set_visible(False)
    longest = max(len(workload["acceptance_by_position"]) for workload in found.values())
    panels[0].set_xlim(0.6, longest + 0.4)
    panels[0].set_xticks(range(1, longest + 1, max(1, longest // 6)))
    panels[0].set_ylim(0, 1)
    panels[0].set_yticks((0, 0.5, 1))
    for axes in panels[max(0, len(found) - columns) : len(found)]:
        axes.tick_params(labelbottom=True)  # the last panel of a column, if the row below is shorter
    figure.supxlabel("position in the draft", fontsize=9.5)
    side_label(figure, "share accepted")
    return figure


def _points(workload: JSON) -> tuple[list[int], list[float]]:
    pairs = [(i, float(v)) for i, v in enumerate(workload["acceptance_by_position"], 1) if v is not None]
    return [i for i, _ in pairs], [v for _, v in pairs]


def _short(text: str, most: int = 19) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def sampled_by_rule(comparison: JSON) -> tuple[str, dict[str, list[JSON]]]:
    """Returns the architecture whose traffic shows the rules' difference, and each rule's conditions by temperature."""
    conditions = reading.samplings(comparison)
    if not conditions:
        raise NothingToDraw("Only one sampling setting was measured: there is nothing to compare.")
    drafting = reading.drafting(reading.base(comparison)) or reading.drafting(conditions[-1])
    if not drafting:
        raise NothingToDraw("No architecture drafted anything.")
    name = reading.DISTRIBUTED if reading.DISTRIBUTED in drafting else drafting[0]
    by_rule: dict[str, list[JSON]] = {}
    for condition in conditions:
        if name in condition["architectures"]:
            by_rule.setdefault(condition["rule"], []).append(condition)
    return name, by_rule


@styled
def acceptance_by_temperature(comparison: JSON) -> Figure:
    """Draws acceptance rate and bytes per token, with one line for each rule."""
    name, by_rule = sampled_by_rule(comparison)
    height = 4.6
    figure, (upper, lower) = new_figure(height, 2, 1, sharex=True)
    rates = _by_rule(by_rule, lambda c: c["architectures"][name]["acceptance_rate"])
    sent = _by_rule(by_rule, lambda c: bytes_per_token(c["architectures"][name]))
    upper.set_title("acceptance rate (thin lines: 95 % interval over prompts)")
    tops = [y for line in rates.values() for _, y in line]
    tops += [
        interval[1]
        for conditions in by_rule.values()
        for c in conditions
        if (interval := c["architectures"][name].get("acceptance_interval"))
    ]
    upper.set_ylim(0, 1.06 * max(tops, default=1.0))
    sizes = [y for line in sent.values() for _, y in line if y]
    logarithmic = bool(sizes) and max(sizes) > 8 * min(sizes)
    lower.set_title("bytes per token, both ways" + (" (log scale)" if logarithmic else ""))
    if logarithmic:
        lower.set_yscale("log")
        lower.set_ylim(min(sizes) / 1.6, max(sizes) * 1.6)
        lower.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        lower.minorticks_off()
    else:
        lower.set_ylim(0, 1.12 * max(sizes, default=1.0))
    temperatures = sorted({float(c["sampling"]["temperature"]) for cs in by_rule.values() for c in cs})
    lower.set_xticks(temperatures, [f"{t:g}" for t in temperatures])
    lower.set_xlabel("temperature (0: greedy)")
    _rate_intervals(upper, name, by_rule)
    for axes, lines in ((upper, rates), (lower, sent)):
        _rule_lines(axes, lines)
        axes.margins(x=0.04)
        only_grid(axes, "y")
        ends = [(points[-1][1], rule, _rule_look(rule)[0]) for rule, points in lines.items()]
        label_lines(axes, ends, height * 0.33)
    return figure


def _rate_intervals(axes: Axes, name: str, by_rule: dict[str, list[JSON]]) -> None:
    """Draws a thin line for each interval, shifted by rule so that they do not overlap."""
    for side, (rule, conditions) in enumerate(by_rule.items()):
        for condition in conditions:
            interval = condition["architectures"][name].get("acceptance_interval")
            if interval:
                at = float(condition["sampling"]["temperature"]) + 0.006 * (2 * side - 1)
                axes.plot((at, at), interval, color=_rule_look(rule)[0], linewidth=1.2, zorder=2)


def bytes_per_token(of: JSON) -> float | None:
    """Returns the bytes per token, both ways."""
    up, down = of["bytes_up_per_token"], of["bytes_down_per_token"]
    return None if up is None or down is None else up + down


def _by_rule(
    by_rule: dict[str, list[JSON]], value: Callable[[JSON], float | None]
) -> dict[str, list[tuple[float, float]]]:
    """Returns (temperature, value) pairs of each rule that has any."""
    found = {
        rule: [(float(c["sampling"]["temperature"]), y) for c in conditions if (y := value(c)) is not None]
        for rule, conditions in by_rule.items()
    }
    return {rule: points for rule, points in found.items() if points}


def _rule_look(rule: str) -> tuple[str, str, Any]:
    return RULES.get(rule, (INK, "D", "-"))


def _rule_lines(axes: Axes, lines: dict[str, list[tuple[float, float]]]) -> None:
    for rule, points in lines.items():
        color, marker, line = _rule_look(rule)
        axes.plot(
            *zip(*points, strict=True), color=color, marker=marker, linestyle=line, markeredgecolor=PAPER,
            clip_on=False, zorder=3,
        )  # fmt: skip
