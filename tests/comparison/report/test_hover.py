"""Values under the pointer: in the picture of the page, without scripts. test_html.py: every plot tells some."""

from __future__ import annotations

import re

from matplotlib.figure import Figure

from tandem.comparison.report import hover
from tandem.comparison.report.images import inline_svg


def targets(svg: str) -> list[str]:
    return re.findall(r'<g class="hover"><(?:circle|rect) [^>]*/><text [^>]*>(.*?)</text></g>', svg)


def test_a_bar_and_a_point_are_where_they_are_drawn_and_their_text_stays_in_the_picture() -> None:
    figure = Figure(figsize=(4, 2))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 4), ylim=(0, 2))
    hover.point(axes, 1, 1.5, "a point")
    hover.bar(axes, 1, 2, 2, 0.5, "a bar")
    svg = inline_svg(figure, "name", "label")
    assert '<circle cx="72.0" cy="36.0"' in svg and '<rect x="144.0" y="54.0" width="144.0" height="36.0"/>' in svg
    assert re.findall(r'text-anchor="(\w+)">a (\w+)', svg) == [("start", "point"), ("end", "bar")]


def test_a_point_outside_the_axes_has_no_target() -> None:
    figure = Figure()
    axes = figure.subplots()
    axes.set(xlim=(0, 1), ylim=(0, 1))
    hover.point(axes, 2, 0.5, "2")
    assert targets(inline_svg(figure, "name", "label")) == []


def test_a_text_of_others_is_only_text() -> None:
    figure = Figure()
    hover.point(figure.subplots(), 0.5, 0.5, """<b> & "c" 'd'""")
    assert targets(inline_svg(figure, "name", "label")) == ["&lt;b&gt; &amp; &quot;c&quot; &#x27;d&#x27;"]
