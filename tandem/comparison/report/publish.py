"""Publishes a run: files, terminal, exit code. Failing parts are reported; the rest is made."""

from __future__ import annotations

import csv
import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from tandem.comparison.analysis import words
from tandem.comparison.analysis.comparison import Comparison, analyse, comparison_as_text
from tandem.comparison.analysis.step_times import step_times
from tandem.comparison.measuring.attempt import tried
from tandem.comparison.measuring.driver import FAILED, OK
from tandem.comparison.measuring.json_form import encoded
from tandem.comparison.measuring.machine_load import MachineLoad
from tandem.comparison.measuring.record_log import RunData
from tandem.comparison.measuring.records import CAUSES, Measurement, Record
from tandem.comparison.report.page import html
from tandem.comparison.report.terminal import TABLE_WIDTH, Detail, print_comparison
from tandem.host.device_times import text_of as times_as_text

REHEARSED = "rehearsed"  # last column: name of the rehearsed step times
CSV_COLUMNS: tuple[str, ...] = (
    *("condition", "architecture", "prompt", "workload", "run", "sent_s", "ended_s"),
    *(f.name for f in fields(Measurement) if f.name not in ("seconds_by_cause", "margins")),
    *(f"{cause}_seconds" for cause in CAUSES),
    "error_code",
    "error_message",
    *(f"machine_{f.name}" for f in fields(MachineLoad)),
    REHEARSED,
)


def publish(measured: RunData, detail: Detail = "short") -> int:
    """Returns OK, or FAILED if a request or a file failed. Raises ValueError without a record."""
    found, remarks = analyse(measured), list[str]()
    written = _write(found, measured, remarks)
    console = Console() if sys.stdout.isatty() else Console(width=TABLE_WIDTH)
    tried(remarks, "The tables", lambda: print_comparison(found, console, detail), None)
    if written and detail in ("short", "all"):
        names = words.joined([path.name for path in written])
        print(f"wrote {names} to {found.config.output_dir}")
    for remark in remarks:
        print(f"compare_architectures.py: error: {remark}", file=sys.stderr)
    return FAILED if found.failed or remarks else OK


def write_files(found: Comparison, measured: RunData) -> tuple[Path, ...]:
    """Writes comparison.json, comparison.csv and the page. Raises OSError with a sentence per failure."""
    remarks: list[str] = []
    written = _write(found, measured, remarks)
    if remarks:
        raise OSError("; ".join(remarks))
    return written


def write_page(found: Comparison, folder: Path) -> Path:
    return write_atomically(folder / "report.html", html(found))


def _write(found: Comparison, measured: RunData, remarks: list[str]) -> tuple[Path, ...]:
    folder, times = found.config.output_dir, step_times(measured)
    texts: dict[str, Callable[[], str]] = {
        "comparison.json": lambda: comparison_as_text(found),
        "comparison.csv": lambda: records_as_csv(found.records, found.config.rehearse),
        "report.html": lambda: html(found),
    }
    if times:
        texts["step_times.json"] = partial(times_as_text, times)

    def write(name: str, make: Callable[[], str]) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        return write_atomically(folder / name, make())

    files = (tried(remarks, name, partial(write, name, make), None) for name, make in texts.items())
    return tuple(path for path in files if path)


def records_as_csv(records: Sequence[Record], rehearsed: str | None = None) -> str:
    """Returns one row per record. Lists are JSON; unmeasured cells are empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, CSV_COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows({**_csv_row(record), REHEARSED: rehearsed} for record in records)
    return text.getvalue()


def _csv_row(record: Record) -> dict[str, Any]:
    row: dict[str, Any] = encoded(record)
    parts = {name: row.pop(name) or {} for name in ("measurement", "error", "machine_load")}
    seconds = parts["measurement"].pop("seconds_by_cause", {})
    parts["measurement"].pop("margins", None)
    return {
        **row,
        **{key: json.dumps(value) if isinstance(value, list) else value for key, value in parts["measurement"].items()},
        **{f"{cause}_seconds": value for cause, value in seconds.items()},
        **{f"error_{key}": value for key, value in parts["error"].items()},
        **{f"machine_{key}": value for key, value in parts["machine_load"].items()},
    }


def write_atomically(path: Path, content: str | bytes) -> Path:
    """Replaces a file atomically, text as UTF-8."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    unfinished.write_bytes(content.encode() if isinstance(content, str) else content)
    os.replace(unfinished, path)
    return path
