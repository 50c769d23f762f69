"""Gives plots values that a page shows while a pointer is over them, without scripts.

Drawing code notes a point or a bar with its text on the figure; `targets_as_svg` makes shapes of them that lie above
the picture, each with its text.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NOTED = "tandem_targets"
"""The attribute of a figure that has its targets."""
RADIUS = 7.0
"""Of a point's target, in the units of the picture."""


@dataclass(frozen=True, slots=True)
class Target:
    """A rectangle between two corners, in the coordinates of the data; a point if they are the same."""

    axes: Axes
    corner: tuple[float, float]
    opposite: tuple[float, float]
    text: str


def point(axes: Axes, x: float, y: float, text: str) -> None:
    """Shows `text` over a point."""
    _noted(axes.figure).append(Target(axes, (x, y), (x, y), text))


def bar(axes: Axes, place: float, left: float, width: float, height: float, text: str) -> None:
    """Shows `text` over a horizontal bar."""
    corners = (left, place - height / 2), (left + width, place + height / 2)
    _noted(axes.figure).append(Target(axes, *corners, text))


def _noted(figure: object) -> list[Target]:
    found: list[Target] = vars(figure).setdefault(NOTED, [])
    return found


def targets_as_svg(figure: Figure, width: float, height: float) -> str:
    """Returns the targets of a figure that was drawn as a picture of this size. Points outside the axes have none."""
    return "".join(_as_svg(target, figure, width, height) for target in _noted(figure) if _inside(target))


def _inside(target: Target) -> bool:
    (left, right), (low, high) = sorted(target.axes.get_xlim()), sorted(target.axes.get_ylim())
    x, y = ((a + b) / 2 for a, b in zip(target.corner, target.opposite, strict=True))
    return left <= x <= right and low <= y <= high


def _as_svg(target: Target, figure: Figure, width: float, height: float) -> str:
    in_figure = target.axes.transData - figure.transFigure
    (x0, y0), (x1, y1) = in_figure.transform([target.corner, target.opposite])
    left, right = sorted((x0 * width, x1 * width))
    top, bottom = sorted(((1 - y0) * height, (1 - y1) * height))
    x, y = (left + right) / 2, (top + bottom) / 2
    if target.corner == target.opposite:
        shape, top = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{RADIUS:g}"/>', y - RADIUS
    else:
        size = f'width="{right - left:.1f}" height="{bottom - top:.1f}"'
        shape = f'<rect x="{left:.1f}" y="{top:.1f}" {size}/>'
    anchor = "start" if x < width / 3 else "end" if x > 2 * width / 3 else "middle"
    above = top - 4 if top > 16 else top + 2 * RADIUS + 14
    said = f'<text x="{x:.1f}" y="{above:.1f}" text-anchor="{anchor}">{escape(target.text)}</text>'
    return f'<g class="hover">{shape}{said}</g>\n'
