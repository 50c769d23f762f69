"""Writes the files of a report."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from tandem.comparison.measuring.attempt import format_error
from tandem.comparison.report.blocks import FORMATS, Plot
from tandem.comparison.report.figures import FIGURES, left_out
from tandem.comparison.report.history import run_as_json, runs_until
from tandem.comparison.report.html import html
from tandem.comparison.report.images import inline_svg, png
from tandem.comparison.report.markdown import markdown
from tandem.comparison.report.reading import JSON
from tandem.comparison.report.rehearsed import LABEL, is_rehearsed
from tandem.comparison.report.sections import report_of

PLOTS = "plots"


def write_report(comparison: JSON, folder: Path, formats: Sequence[str] = ("html",)) -> tuple[Path, ...]:
    """Writes report.html, report.md or both, and plots/*.png. Returns the paths, reports first.

    `comparison` is a parsed comparison.json, version 2. Without matplotlib there are no plots, and the report says so.
    Earlier runs are those of the index beside `folder`.
    Raises ValueError for an unknown format or version, OSError if nothing can be written.
    """
    if unknown := [name for name in formats if name not in FORMATS]:
        raise ValueError(f"format: {unknown[0]!r} is not one of {', '.join(FORMATS)}")
    pngs: dict[str, bytes] = {}
    svgs: dict[str, str] = {}
    before = runs_until(run_as_json(comparison, folder), folder)
    report = report_of(comparison, _draw(comparison, pngs, svgs), before)
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    if "html" in formats:
        written.append(write_atomically(folder / "report.html", html(report, svgs)))
    if "md" in formats:
        links = {name: f"{PLOTS}/{name}.png" for name in pngs}
        written.append(write_atomically(folder / "report.md", markdown(report, links)))
    if pngs:
        (folder / PLOTS).mkdir(exist_ok=True)
    written += [write_atomically(folder / PLOTS / f"{name}.png", content) for name, content in pngs.items()]
    return tuple(written)


def _draw(comparison: JSON, pngs: dict[str, bytes], svgs: dict[str, str]) -> dict[str, Plot]:
    """Draws the plots, none without matplotlib, and returns their blocks; of one that fails, a block that says so."""
    blocks = {figure.name: figure.block(comparison) for figure in FIGURES}
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return blocks
    for name, draw in ((figure.name, figure.draw) for figure in FIGURES if blocks[figure.name].drawn):
        try:
            drawn = draw(comparison)
            if is_rehearsed(comparison):
                drawn.text(1, 0, LABEL, ha="right", va="bottom")
            pngs[name], svgs[name] = (
                png(drawn),
                inline_svg(drawn, name, f"{blocks[name].title}. {blocks[name].finding}"),
            )
        except Exception as error:
            why = f"it could not be drawn: {format_error(error)}"
            blocks[name] = left_out(name, blocks[name].title, why, failed=True)
    return blocks


def write_atomically(path: Path, content: str | bytes) -> Path:
    """Replaces a file atomically, so that readers never see half of it. Text is encoded as UTF-8."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    unfinished.write_bytes(content.encode() if isinstance(content, str) else content)
    os.replace(unfinished, path)
    return path
