"""Gives plots values that a page shows while a pointer is over them, without scripts.

Drawing code marks a point or a bar with its text by an invisible artist; `as_targets` makes SVG of these.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PREFIX = "hover:"
ABOVE = 10
"""The order of drawing: above everything that can be seen."""
RADIUS = 8
"""Of a point's target, in the units of the picture."""
MARK = rf"""<g id=(?:"{PREFIX}(?P<text>[^"]*)"|'{PREFIX}(?P<quoted>[^']*)')>\s*"""
POINT = MARK + r"""<defs>.*?</defs>\s*<g[^>]*>\s*<use [^>]*?x="(?P<x>[^"]+)" y="(?P<y>[^"]+)"[^>]*/>\s*</g>\s*</g>"""
BAR = MARK + r"""<path d="(?P<path>[^"]*)"[^>]*/>\s*</g>"""


def point(axes: Axes, x: float, y: float, text: str) -> None:
    """Shows `text` over a point, in the coordinates of the data."""
    axes.scatter([x], [y], color="none", gid=PREFIX + text, zorder=ABOVE, clip_on=False)


def bar(axes: Axes, place: float, left: float, width: float, height: float, text: str) -> None:
    """Shows `text` over a horizontal bar, in the coordinates of the data."""
    (shape,) = axes.barh([place], [width], height, [left], color="none", edgecolor="none", zorder=ABOVE)
    shape.set_gid(PREFIX + text)


def as_targets(svg: str, width: float) -> str:
    """Replaces the invisible artists in the text of a picture `width` units wide by targets with their texts."""

    def of_point(match: re.Match[str]) -> str:
        x, y = float(match["x"]), float(match["y"])
        return _target(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{RADIUS}"/>', x, y - RADIUS, width, match)

    def of_bar(match: re.Match[str]) -> str:
        numbers = [float(number) for number in re.findall(r"-?\d+(?:\.\d+)?", match["path"])]
        xs, ys = numbers[::2], numbers[1::2]
        x, y, wide, high = min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys)
        shape = f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{high:.1f}"/>'
        return _target(shape, x + wide / 2, y, width, match)

    return re.sub(BAR, of_bar, re.sub(POINT, of_point, svg, flags=re.DOTALL))


def _target(shape: str, x: float, top: float, width: float, match: re.Match[str]) -> str:
    """Returns the shape with its text above it, or below where there is no room; inside the picture at its sides."""
    anchor = "start" if x < width / 3 else "end" if x > 2 * width / 3 else "middle"
    y = top - 4 if top > 16 else top + 2 * RADIUS + 14
    text = match["quoted"].replace('"', "&quot;") if match["text"] is None else match["text"]
    return f'<g class="hover">{shape}<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text></g>'
