"""Writes the files of a report."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tandem.comparison.report.attempt import format_error
from tandem.comparison.report.blocks import Block, Plot, Report
from tandem.comparison.report.figures import FIGURES, left_out
from tandem.comparison.report.html import html
from tandem.comparison.report.images import inline_svg, png
from tandem.comparison.report.markdown import markdown
from tandem.comparison.report.sections import report_of

FORMATS = ("html", "md")
PLOTS = "plots"


def write_report(comparison: Mapping[str, Any], folder: Path, formats: Sequence[str] = ("html",)) -> tuple[Path, ...]:
    """Writes report.html, report.md or both, and plots/*.png. Returns the paths, reports first.

    `comparison` is a parsed comparison.json, version 2. Without matplotlib there are no plots, and the report says so.
    Raises ValueError for an unknown format or version, OSError if nothing can be written.
    """
    if unknown := [name for name in formats if name not in FORMATS]:
        raise ValueError(f"format: {unknown[0]!r} is not one of {', '.join(FORMATS)}")
    report = report_of(comparison)
    pngs, svgs, undrawn = _pictures(comparison, report)
    report = without_pictures(report, undrawn)
    folder.mkdir(parents=True, exist_ok=True)
    if pngs:
        (folder / PLOTS).mkdir(exist_ok=True)
    written: list[Path] = []
    if "html" in formats:
        written.append(write_atomically(folder / "report.html", html(report, svgs)))
    if "md" in formats:
        links = {name: f"{PLOTS}/{name}.png" for name in pngs}
        written.append(write_atomically(folder / "report.md", markdown(report, links)))
    written += [write_atomically(folder / PLOTS / f"{name}.png", content) for name, content in pngs.items()]
    return tuple(written)


def _pictures(
    comparison: Mapping[str, Any], report: Report
) -> tuple[dict[str, bytes], dict[str, str], dict[str, Plot]]:
    """Draws the plots. Returns PNGs, SVGs, and replacements for plots that could not be drawn, all by name.

    All are empty without matplotlib.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return {}, {}, {}
    blocks = {block.name: block for section in report.sections for block in section.blocks if isinstance(block, Plot)}
    pngs: dict[str, bytes] = {}
    svgs: dict[str, str] = {}
    undrawn: dict[str, Plot] = {}
    for figure in FIGURES:
        block = blocks[figure.name]
        if not block.drawn:
            continue
        try:
            drawn = figure.draw(comparison)
            picture, svg = png(drawn), inline_svg(drawn, figure.name, f"{block.title}. {block.finding}")
        except Exception as error:
            undrawn[figure.name] = left_out(figure.name, figure.title, f"it could not be drawn: {format_error(error)}")
        else:
            pngs[figure.name], svgs[figure.name] = picture, svg
    return pngs, svgs, undrawn


def without_pictures(report: Report, undrawn: Mapping[str, Plot]) -> Report:
    """Replaces the plots of these names by other blocks."""

    def shown(block: Block) -> Block:
        return undrawn.get(block.name, block) if isinstance(block, Plot) else block

    sections = (replace(section, blocks=tuple(map(shown, section.blocks))) for section in report.sections)
    return replace(report, sections=tuple(sections)) if undrawn else report


def write_atomically(path: Path, content: str | bytes) -> Path:
    """Replaces a file atomically, so that readers never see half of it. Text is encoded as UTF-8."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    unfinished.write_bytes(content.encode() if isinstance(content, str) else content)
    os.replace(unfinished, path)
    return path
