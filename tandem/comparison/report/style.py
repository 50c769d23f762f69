"""Defines the style of plots: palette, markers, hatches, and labels at the lines.

Imports matplotlib on use: without it, the rest of a report is still written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from tandem.comparison.report import formatting as fmt

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

WIDTH = 4.8
"""Inches: natural size on a phone, larger on a screen; 9 point text is legible on both."""

INK, QUIET, RULE, BAND, PAPER = "#1d1d21", "#66666e", "#d7d7dc", "#ececf0", "#fefefe"


@dataclass(frozen=True, slots=True)
class Look:
    """An architecture's color-blind safe color (after Okabe and Ito) and its marker and hatch for black and white."""

    color: str
    marker: str
    hatch: str


LOOKS = {
    "autoregressive": Look("#5f6570", "s", ""),
    "lookup": Look("#9b2d5e", "<", "++++"),
    "distributed": Look("#0b6fb3", "o", "//////"),
    "fused": Look("#cf5a0a", "D", ""),
    "remote_draft": Look("#0a8f6c", "^", "\\\\\\\\\\\\"),
    "pipelined": Look("#a8558c", "v", ""),
    "never_waiting": Look("#7a6a00", ">", "...."),
    "autoregressive_width_1": Look("#8b919c", "P", ""),
}
OTHERS = (Look("#8a6d00", "X", "xxxx"), Look("#5b53b5", "p", "||||"), Look("#3d3d44", "h", "----"))
CAUSES = {  # dark to light for unavoidable time; the network stands out
    "verify": ("#4a5568", ""),
    "draft": ("#8fa3bd", "//////"),
    "network": ("#e0a21b", "xxxx"),
    "prefill": ("#b9b4c7", "||||"),
    "queue": ("#7d6b91", "------"),
    "other": ("#dcdde2", ""),
}
THEMED = {
    INK: "--ink",
    QUIET: "--quiet",
    RULE: "--rule",
    BAND: "--band",
    PAPER: "--paper",
    **{look.color: f"--{key.replace('_', '-')}" for key, look in LOOKS.items()},
    **{color: f"--cause-{key}" for key, (color, _) in CAUSES.items()},
}
"""Plot colors by the name of the page's variable, so that they follow light and dark mode."""

SETTINGS: dict[str, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so that plots are the same on every machine
    "font.size": 9.5,
    "text.parse_math": False,  # a $ in a name is a literal $
    "svg.fonttype": "none",
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 9.5,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "legend.handlelength": 1.6,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": QUIET,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "axes.facecolor": "none",
    "figure.facecolor": PAPER,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.8,
    "lines.markersize": 6.5,
    "hatch.linewidth": 0.6,
    "figure.constrained_layout.h_pad": 0.05,
    "figure.constrained_layout.w_pad": 0.04,
}


@contextmanager
def in_style() -> Iterator[None]:
    """Applies these settings for drawing and saving, without the user's matplotlibrc. Also decorates functions."""
    from matplotlib import style

    with style.context(["default", SETTINGS]):
        yield


def look(architecture: str, among: Sequence[str]) -> Look:
    """Returns a look. `among`: all architectures, so that an unknown one looks the same in every plot."""
    strangers = [other for other in among if other not in LOOKS]
    return LOOKS.get(architecture) or OTHERS[strangers.index(architecture) % len(OTHERS)]


def new_figure(height: float, rows: int = 1, columns: int = 1, **subplots: Any) -> tuple[Figure, list[Axes]]:
    """Creates a figure of `height` inches and returns it with its axes, row by row."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **subplots)
    return figure, list(axes.flat)


def panels(
    count: int, columns: int, single: float, each: float, labels: tuple[str, str], extra: float
) -> tuple[Figure, list[Axes]]:
    """Creates `count` panels with common scales: `single` inches high in one row, else `each` for a row and `extra`.

    labels: of all x and all y axes together.
    """
    columns = min(columns, count)
    rows = -(-count // columns)
    figure, axes = new_figure(single if rows == 1 else each * rows + extra, rows, columns, sharex=True, sharey=True)
    for one in axes[max(0, count - columns) : count]:
        one.tick_params(labelbottom=True)  # the last panel of a column, if the row below is shorter
    for one in axes[count:]:
        one.set_visible(False)
    figure.supxlabel(labels[0], fontsize=9.5)
    figure.supylabel(labels[1], fontsize=9.5, rotation_mode="anchor", ha="center", va="top")
    return figure, axes[:count]


def handle(architecture: str, among: Sequence[str], label: str = "") -> Line2D:
    """Returns a line for a legend."""
    from matplotlib.lines import Line2D

    of = look(architecture, among)
    return Line2D(
        [], [], color=of.color, marker=of.marker, markeredgecolor=PAPER, label=label or fmt.name(architecture)
    )


def legend_above(figure: Figure, columns: int, handles: Sequence[Line2D] = (), **how: Any) -> None:
    """Draws a legend over the axes: of `handles`, or of everything with a label."""
    how = {"columnspacing": 1.2, "borderpad": 0, **({"handles": handles} if handles else {}), **how}
    figure.legend(loc="outside upper left", ncols=columns, **how)


def only_grid(axes: Axes, axis: Literal["x", "y"]) -> None:
    """Draws grid lines along one axis, without ticks."""
    axes.grid(False)
    axes.grid(True, axis=axis)
    axes.tick_params(length=0)


def value_label(axes: Axes, text: str, at: tuple[float, float], away: tuple[float, float] = (4, 0)) -> None:
    """Writes a figure `away` points from its position, legible over lines."""
    axes.annotate(
        text,
        at,
        away,
        textcoords="offset points",
        ha="center" if not away[0] else "left",
        va="center" if not away[1] else "bottom" if away[1] > 0 else "top",
        fontsize=9,
        bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 0.6, "alpha": 0.85},
        zorder=5,
    )


def spread(positions: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Moves positions apart to at least `gap`, as little as possible, inside [low, high] if they fit."""
    order = sorted(range(len(positions)), key=lambda i: positions[i])
    placed = [positions[i] for i in order]
    for _ in range(200):
        before = list(placed)
        for i in range(len(placed) - 1):
            if (short := gap - (placed[i + 1] - placed[i])) > 1e-9 * gap:
                placed[i] -= short / 2
                placed[i + 1] += short / 2
        if placed:
            placed[-1], placed[0] = min(placed[-1], high), max(placed[0], low)
        if placed == before:
            break
    result = list(positions)
    for i, position in zip(order, placed, strict=True):
        result[i] = position
    return result


def label_lines(axes: Axes, ends: Sequence[tuple[float, str, str]], height_inches: float) -> None:
    """Writes names at the right edge of the axes, beside the ends of their lines: (y in data, text, color)."""
    low, high = axes.get_ylim()
    to_share = axes.transScale.transform
    bottom, top = to_share((1, low))[1], to_share((1, high))[1]
    shares = [float((to_share((1, y))[1] - bottom) / (top - bottom)) for y, _, _ in ends]
    gap = 9.5 * 1.35 / (72 * height_inches)
    for share, place, (_, text, color) in zip(shares, spread(shares, gap, 0.0, 1.0), ends, strict=True):
        axes.annotate(
            text,
            xy=(1, share),
            xytext=(14, (place - share) * 72 * height_inches),
            xycoords="axes fraction",
            textcoords="offset points",
            va="center",
            color=color,
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": color, "lw": 0.7, "shrinkA": 1, "shrinkB": 2, "relpos": (0, 0.5)},
        )
