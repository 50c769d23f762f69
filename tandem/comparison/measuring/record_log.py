"""Writes every measurement to `records.jsonl` at once, and reads the file again.

The first line has the settings and the machine; servers, links, requests, calibration requests and margins follow as
they are measured, and the last line tells whether the run is complete. The file alone suffices for a report.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from tandem.comparison.analysis.identity import MarginTrace
from tandem.comparison.links.overhead import LinkOverhead
from tandem.comparison.measuring.calibration import Calibration
from tandem.comparison.measuring.conditions import LinkChoice
from tandem.comparison.measuring.config import ComparisonConfig, settings_as_json
from tandem.comparison.measuring.deployment import Endpoint
from tandem.comparison.measuring.environment import Machine, Versions
from tandem.comparison.measuring.from_json import decoded
from tandem.comparison.measuring.records import Failure, Record
from tandem.comparison.measuring.run_data import RunData

NAME = "records.jsonl"
FORMAT = 1
"""The version of the format; incremented when the meaning of a line changes or a line is removed."""


class RecordLog:
    """Keeps measurements in memory and writes them to a file line by line."""

    def __init__(self, measured: RunData) -> None:
        """Replaces an existing file. Raises OSError if it cannot be written."""
        self.measured = measured
        self.path = measured.config.output_dir / NAME
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO | None = self.path.open("w", encoding="utf-8")
        self._write(
            "run",
            format=FORMAT,
            started_at=measured.started_at,
            settings=settings_as_json(measured.config),
            machine=asdict(measured.machine),
            versions=asdict(measured.versions),
        )

    def __enter__(self) -> RecordLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file:
            self._file.close()

    def servers(self, endpoints: Sequence[Endpoint]) -> None:
        self.measured.endpoints = tuple(endpoints)
        self._write("servers", endpoints=[asdict(endpoint) for endpoint in endpoints])

    def warm_up_failed(self, architecture: str, failure: Failure) -> None:
        self.measured.warm_up_failures[architecture] = failure
        self._write("warm-up failure", architecture=architecture, failure=asdict(failure))

    def link(self, choice: LinkChoice, overhead: LinkOverhead) -> None:
        self.measured.links[choice] = overhead
        self._write("link", link=asdict(choice), overhead=asdict(overhead))

    def record(self, record: Record) -> None:
        self.measured.records.append(record)
        self._write("record", record=asdict(record))

    def calibration(self, calibration: Calibration) -> None:
        self.measured.calibrations.append(calibration)
        self._write("calibration", calibration=asdict(calibration))

    def margins(self, condition: str, prompt: str, trace: MarginTrace) -> None:
        self.measured.margins[condition, prompt] = trace
        self._write("margins", condition=condition, prompt=prompt, trace=asdict(trace))

    def remark(self, text: str) -> None:
        self.measured.remarks.append(text)
        self._write("remark", text=text)

    def end(self, cut_short: str | None = None) -> None:
        """Records the end of the run; `cut_short` is why it ended early."""
        self.measured.ended, self.measured.cut_short = True, cut_short
        self._write("end", cut_short=cut_short)

    def _write(self, kind: str, **values: Any) -> None:
        """Writes and flushes a line. If the disk is full, the file ends but the comparison goes on."""
        if self._file is None:
            return
        try:
            self._file.write(json.dumps({"kind": kind, **values}, default=_plain, ensure_ascii=False) + "\n")
            self._file.flush()
        except OSError as error:
            with suppress(OSError):
                self._file.close()
            self._file = None
            self.measured.remarks.append(f"{self.path} ends early, it could not be written: {error}")


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} is not for a record log")


def read_records(path: Path, flag: str = "from-records") -> RunData:
    """Reads what an earlier run wrote; the output folder is the file's. Raises a one-line ValueError."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(f"{flag}: {path} does not exist") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{flag}: {path} cannot be read: {' '.join(str(error).split())}") from None
    first, *rest = text.split("\n")[:-1] or [""]  # an incomplete last line was being written when the run died
    number = 1
    try:
        measured = _header(json.loads(first), path.parent)
        for line in rest:
            number += 1
            _add(measured, json.loads(line))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        why = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{flag}: {path}, line {number}: not of a comparison's records: {why}") from None
    return measured


@dataclass(frozen=True)
class _Run:
    """The first line, without its settings."""

    kind: str
    format: int
    started_at: str
    machine: Machine
    versions: Versions


def _header(line: dict[str, Any], folder: Path) -> RunData:
    if not isinstance(line, dict) or line.get("format") != FORMAT:
        raise ValueError(f"format {FORMAT} is needed")
    settings = {**line.pop("settings"), "output_dir": folder, "baseline": None}
    run = decoded(_Run, line)
    return RunData(decoded(ComparisonConfig, settings), run.machine, run.versions, run.started_at)


def _add(measured: RunData, line: dict[str, Any]) -> None:
    kind = line["kind"]
    if kind == "servers":
        measured.endpoints = tuple(decoded(Endpoint, one) for one in line["endpoints"])
    elif kind == "warm-up failure":
        measured.warm_up_failures[line["architecture"]] = decoded(Failure, line["failure"])
    elif kind == "link":
        measured.links[decoded(LinkChoice, line["link"])] = decoded(LinkOverhead, line["overhead"])
    elif kind == "record":
        measured.records.append(decoded(Record, line["record"]))
    elif kind == "calibration":
        measured.calibrations.append(decoded(Calibration, line["calibration"]))
    elif kind == "margins":
        measured.margins[line["condition"], line["prompt"]] = decoded(MarginTrace, line["trace"])
    elif kind == "remark":
        measured.remarks.append(line["text"])
    elif kind == "end":
        measured.ended, measured.cut_short = True, line["cut_short"]
    else:
        raise ValueError(f"kind {kind!r} is unknown")
