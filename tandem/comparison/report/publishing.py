"""Publishes a run: files, terminal output, exit code. Parts that fail are reported; the rest is made."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from tandem.comparison.analysis.run_analysis import analyse
from tandem.comparison.analysis.step_times import step_times
from tandem.comparison.measuring.attempt import tried
from tandem.comparison.measuring.driver import FAILED, OK
from tandem.comparison.measuring.record_log import RunData
from tandem.comparison.report.files import Comparison, comparison_as_csv, comparison_as_json, text_of
from tandem.comparison.report.history import append_run
from tandem.comparison.report.load_tables import loads_as_csv
from tandem.comparison.report.reading import JSON
from tandem.comparison.report.terminal import TABLE_WIDTH, print_comparison
from tandem.comparison.report.write import write_atomically, write_report
from tandem.host.device_times import text_of as times_as_text


def publish(measured: RunData, new: bool = True) -> int:
    """Publishes a run. Returns OK, or FAILED if a request or a file failed.

    A `new` run is added to the index of runs. Raises ValueError if nothing was measured.
    """
    comparison, remarks = analyse(measured), list[str]()
    folder = comparison.config.output_dir
    as_json = tried(remarks, "The report", lambda: comparison_as_json(comparison), None)
    if as_json is not None:
        files = _write(comparison, as_json, remarks)
        tried(remarks, "The tables", lambda: print_comparison(as_json, _console()), None)
        if files:
            print("wrote " + ", ".join(str(path) for path in files if path.suffix != ".png"))
        if any(path.suffix == ".png" for path in files):
            print(f"plots as PNG are in {folder / 'plots'}")
        index = new and tried(remarks, "The line in the index of runs", lambda: append_run(as_json, folder), None)
        if index:
            print(f"the run is a line in {index}")
    for remark in remarks:
        print(f"compare_architectures.py: error: {remark}", file=sys.stderr)
    return FAILED if comparison.failed or remarks else OK


def write_files(comparison: Comparison) -> tuple[Path, ...]:
    """Writes comparison.json, comparison.csv and the report. Raises OSError with the sentences of all that failed."""
    remarks: list[str] = []
    written = _write(comparison, comparison_as_json(comparison), remarks)
    if remarks:
        raise OSError("; ".join(remarks))
    return written


def _write(comparison: Comparison, as_json: JSON, remarks: list[str]) -> tuple[Path, ...]:
    folder = comparison.config.output_dir
    rows = comparison_as_csv(comparison.records, comparison.config.rehearse)
    tried(remarks, "The folder", lambda: folder.mkdir(parents=True, exist_ok=True), None)
    parts: dict[str, Callable[[], tuple[Path, ...]]] = {
        "comparison.json": lambda: (write_atomically(folder / "comparison.json", text_of(as_json)),),
        "comparison.csv": lambda: (write_atomically(folder / "comparison.csv", rows),),
        "step_times.json": lambda: (
            (write_atomically(folder / "step_times.json", times_as_text(times)),)
            if (times := step_times(comparison))
            else ()
        ),
        "loads.csv": lambda: (
            (write_atomically(folder / "loads.csv", loads_as_csv(as_json)),) if comparison.under_load else ()
        ),
        "The report as html": lambda: write_report(as_json, folder, ("html",)),
    }
    none: tuple[Path, ...] = ()
    return tuple(path for what, make in parts.items() for path in tried(remarks, what, make, none))


def _console() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=TABLE_WIDTH)
