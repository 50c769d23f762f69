"""Publishes a run: files (step times too), terminal, exit code. Failing parts are reported; the rest is made."""

from __future__ import annotations

import os
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console

from tandem.comparison.analysis import words
from tandem.comparison.analysis.comparison import Comparison, analyse, comparison_as_text
from tandem.comparison.measuring.architectures import AUTOREGRESSIVE, WIDTH_1
from tandem.comparison.measuring.attempt import tried
from tandem.comparison.measuring.driver import FAILED, OK
from tandem.comparison.measuring.record_log import RunData
from tandem.comparison.measuring.records import Measurement
from tandem.comparison.report.page import html
from tandem.comparison.report.printed import TABLE_WIDTH, Detail, print_comparison
from tandem.host.device_times import DeviceTimes, StepTime, StepTimes, text_of


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


def step_times(measured: RunData) -> DeviceTimes | None:
    """Returns the servers' step times; None without any, or for a rehearsal: those are in a file already."""
    models = [endpoint.model for endpoint in measured.endpoints]
    if not models or any(model.rehearsals for model in models) or measured.config.connect:
        return None
    target = _target(measured)
    draft = _draft(measured)
    if target is None:
        return None
    drafts = next((model.draft_name for model in models if model.draft_name), "")
    return DeviceTimes(
        name="measured",
        device=f"{measured.machine.processor}, {measured.machine.usable_cores} cores, with {models[0].model_name}",
        source=f"tandem compare, {measured.started_at}, medians over rows measured one at a time",
        target=replace(target, model=models[0].model_name),
        draft=draft and replace(draft, model=drafts),
    )


def _target(measured: RunData) -> StepTimes | None:
    """Medians of verification seconds by tokens fed."""
    seconds: defaultdict[int, list[float]] = defaultdict(list)
    plain = [r.measurement for r in measured.records if r.architecture in (AUTOREGRESSIVE.name, WIDTH_1.name)]
    for one in [*filter(None, plain), *_calibrated(measured)]:
        if one.rounds and one.seconds_by_cause.verify > 0:
            seconds[round(1 + one.drafted / one.rounds)].append(one.seconds_by_cause.verify / one.rounds)
    return _times({width: statistics.median(values) for width, values in seconds.items()})


def _draft(measured: RunData) -> StepTimes | None:
    """The median seconds of one draft token of a model; copies cost almost nothing."""
    known: list[float] = []
    for one in _calibrated(measured):
        by_models = sum(count for proposer, count in one.drafted_by.items() if proposer != "ngram")
        if by_models and one.seconds_by_cause.draft:
            known.append(one.seconds_by_cause.draft / by_models)
    return _times({1: statistics.median(known)}) if known else None


def _calibrated(measured: RunData) -> list[Measurement]:
    return [one for by_length in measured.calibrations.values() for found in by_length.values() for one in found]


def _times(seconds: dict[int, float]) -> StepTimes | None:
    points = tuple(StepTime(round(1000 * value, 4), width) for width, value in sorted(seconds.items()) if value > 5e-8)
    return StepTimes(points) if points else None


def write_atomically(path: Path, content: str | bytes) -> Path:
    """Replaces a file atomically, text as UTF-8."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    unfinished.write_bytes(content.encode() if isinstance(content, str) else content)
    os.replace(unfinished, path)
    return path
