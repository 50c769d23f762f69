"""report.html: one file, nothing outside it, no script. jinja2 is imported inside functions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tandem.comparison.report.blocks import Report

NO_PLOTS = "Plots need matplotlib (pip install 'tandem-speculative[comparison]')."


def html(report: Report, pictures: Mapping[str, str]) -> str:
    """The page. `pictures`: trusted <svg> texts by plot name; everything else is escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_unbroken,
    )
    trusted = {name: Markup(svg) for name, svg in pictures.items()}
    return environment.get_template("report.html.jinja").render(report=report, pictures=trusted, no_plots=NO_PLOTS)


def _unbroken(value: Any) -> Any:
    """No line ends between a figure and its unit."""
    return re.sub(r"(?<=\d) (?=(?:%|ms|s|GiB)(?!\w))", "\N{NO-BREAK SPACE}", value) if type(value) is str else value
