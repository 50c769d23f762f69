"""Saves figures as PNG files and as inline SVG. Imports matplotlib on use."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING

from tandem.comparison.report import hover
from tandem.comparison.report.style import THEMED, in_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI, POINTS = 200, 72
"""Of an inch: dots of a PNG, units of an SVG."""


def png(figure: Figure) -> bytes:
    """Returns the PNG of a figure, without date or version, so that equal figures give equal bytes."""
    out = io.BytesIO()
    with in_style():
        figure.savefig(out, format="png", dpi=DPI, metadata={"Software": None})
    return out.getvalue()


def inline_svg(figure: Figure, name: str, label: str) -> str:
    """Returns an <svg> for HTML: ids contain `name`, text uses the page's font, colors are the page's variables.

    `label` describes the figure to screen readers; it is escaped here.
    """
    import matplotlib as mpl

    out = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with in_style(), mpl.rc_context({"svg.hashsalt": name}):
        figure.savefig(out, format="svg", transparent=True, metadata=nothing)
    targets = hover.targets_as_svg(figure, *(POINTS * inches for inches in figure.get_size_inches()))
    return _for_a_page(out.getvalue(), name, label).replace("</svg>", f"{targets}</svg>")


def _for_a_page(svg: str, name: str, label: str) -> str:
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r"<!--.*?-->", "", body, flags=re.DOTALL)
    box = re.search(r'viewBox="([^"]+)"', body)
    body = body[body.index(">") + 1 :]
    body = _own_ids(body.replace("xlink:href", "href"), name)
    body = re.sub(r"font: ([^;\"]*?)(\d[\d.]*)px [^;\"]*", _font, body)  # matplotlib before 3.11 wrote this
    body = re.sub(r"font-family: [^;\"]*;? ?", "", body)
    for color, variable in THEMED.items():
        body = re.sub(rf"{color}(?![0-9a-f])", f"var({variable})", body, flags=re.IGNORECASE)
    body = re.sub(r"\n\s*", "\n", body)
    text = label.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")
    return f'<svg viewBox="{box[1] if box else ""}" role="img" aria-label="{text}">{body}'


def _own_ids(body: str, name: str) -> str:
    """Prefixes referenced ids with the plot's name and removes the others."""
    referred = set(re.findall(r"#([\w.-]+)(?=[\")])", body))

    def own(match: re.Match[str]) -> str:
        return f' id="{name}-{match[1]}"' if match[1] in referred else ""

    body = re.sub(r'\sid="([^"]+)"', own, body)
    body = re.sub(r"url\(#([\w.-]+)\)", rf"url(#{name}-\1)", body)
    return re.sub(r'href="#([\w.-]+)"', rf'href="#{name}-\1"', body)


def _font(match: re.Match[str]) -> str:
    """Removes the font family and keeps size and weight."""
    weight = "font-weight: 700; " if re.search(r"bold|[6-9]00", match[1]) else ""
    return f"{weight}font-size: {match[2]}px"
