"""Figures as PNG files and as SVG inside a page. matplotlib is imported inside functions."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING

from tandem.comparison.report.style import THEMED, in_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 200


def png(figure: Figure) -> bytes:
    """The same bytes for the same figure: no date, no version."""
    out = io.BytesIO()
    with in_style():
        figure.savefig(out, format="png", dpi=DPI, metadata={"Software": None})
    return out.getvalue()


def inline_svg(figure: Figure, name: str, label: str) -> str:
    """An <svg> to put into HTML: ids carry `name`, text is text in the page's font, colours are the page's variables.

    `label` says to those who can't see it what it shows. It is escaped here.
    """
    import matplotlib as mpl

    out = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with in_style(), mpl.rc_context({"svg.hashsalt": name}):
        figure.savefig(out, format="svg", transparent=True, metadata=nothing)
    return _for_a_page(out.getvalue(), name, label)


def _for_a_page(svg: str, name: str, label: str) -> str:
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r"<!--.*?-->", "", body, flags=re.DOTALL)
    box = re.search(r'viewBox="([^"]+)"', body)
    body = body[body.index(">") + 1 :]
    body = _own_ids(body.replace("xlink:href", "href"), name)
    body = re.sub(r"font: ([^;\"]*?)(\d[\d.]*)px [^;\"]*", _font, body)  # how matplotlib wrote it before 3.11
    body = re.sub(r"font-family: [^;\"]*;? ?", "", body)
    for color, variable in THEMED.items():
        body = re.sub(rf"{color}(?![0-9a-f])", f"var({variable})", body, flags=re.IGNORECASE)
    body = re.sub(r"\n\s*", "\n", body)
    text = label.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")
    return f'<svg viewBox="{box[1] if box else ""}" role="img" aria-label="{text}">{body}'


def _own_ids(body: str, name: str) -> str:
    """Ids that something refers to get the plot's name before them; those of mere groups go."""
    referred = set(re.findall(r"#([\w.-]+)(?=[\")])", body))

    def own(match: re.Match[str]) -> str:
        return f' id="{name}-{match[1]}"' if match[1] in referred else ""

    body = re.sub(r'\sid="([^"]+)"', own, body)
    body = re.sub(r"url\(#([\w.-]+)\)", rf"url(#{name}-\1)", body)
    return re.sub(r'href="#([\w.-]+)"', rf'href="#{name}-\1"', body)


def _font(match: re.Match[str]) -> str:
    """Size and weight stay; the family is the page's."""
    weight = "font-weight: 700; " if re.search(r"bold|[6-9]00", match[1]) else ""
    return f"{weight}font-size: {match[2]}px"
