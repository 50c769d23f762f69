"""Renders report.html: one self-contained file without scripts. Imports jinja2 on use."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tandem.comparison.report.blocks import Report
from tandem.installing import install_command


def no_plots() -> str:
    """What stands in place of plots where matplotlib is not installed."""
    return f"Plots need matplotlib ({install_command('comparison')})."


def html(report: Report, pictures: Mapping[str, str]) -> str:
    """Renders the page. `pictures`: trusted <svg> texts by plot name; all other text is escaped."""
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
    return environment.get_template("report.html.jinja").render(report=report, pictures=trusted, no_plots=no_plots())


def _unbroken(value: Any) -> Any:
    """Puts no-break spaces between figures and units."""
    return re.sub(r"(?<=\d) (?=(?:%|ms|s|GiB)(?!\w))", "\N{NO-BREAK SPACE}", value) if type(value) is str else value
