"""Publishes a run: files, terminal, exit code. Failing parts are reported; the rest is made."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rich.console import Console

from tandem.comparison.analysis import words
from tandem.comparison.analysis.comparison import Comparison, analyse, comparison_as_text
from tandem.comparison.analysis.step_times import step_times
from tandem.comparison.measuring.attempt import tried
from tandem.comparison.measuring.driver import FAILED, OK
from tandem.comparison.measuring.record_log import RunData
from tandem.comparison.report.page import html
from tandem.comparison.report.terminal import TABLE_WIDTH, Detail, print_comparison
from tandem.host.device_times import text_of


def publish(measured: RunData, detail: Detail = "short") -> int:
    """Returns OK, or FAILED if a request or a file failed. Raises ValueError without a record."""
    found, remarks = analyse(measured), list[str]()
    written = write_files(found, measured, remarks)
    console = Console() if sys.stdout.isatty() else Console(width=TABLE_WIDTH)
    tried(remarks, "The tables", lambda: print_comparison(found, console, detail), None)
    if written and detail in ("short", "all"):
        print(f"wrote {words.joined(written)} to {found.config.output_dir}")
    for remark in remarks:
        print(f"compare_architectures.py: error: {remark}", file=sys.stderr)
    return FAILED if found.failed or remarks else OK


def write_files(found: Comparison, measured: RunData, remarks: list[str]) -> list[str]:
    """Returns the names of the files; a failure becomes a remark."""
    folder, times = found.config.output_dir, step_times(measured)
    texts: dict[str, Callable[[], str]] = {
        "report.html": lambda: html(found),
        "comparison.json": lambda: comparison_as_text(found),
    }
    if times:
        texts["step_times.json"] = lambda: text_of(times)

    def write(name: str, make: Callable[[], str]) -> str:
        folder.mkdir(parents=True, exist_ok=True)
        return write_atomically(folder / name, make()).name

    files = (tried(remarks, name, partial(write, name, make), None) for name, make in texts.items())
    return [name for name in files if name]


def write_atomically(path: Path, content: str | bytes) -> Path:
    """Replaces a file atomically, text as UTF-8."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    unfinished.write_bytes(content.encode() if isinstance(content, str) else content)
    os.replace(unfinished, path)
    return path
