"""Writes the raw measurements of a run to `records.jsonl` line by line, and reads them again.

The first line has settings and machine, the last whether the run is complete. The file suffices for a report.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from tandem.comparison.links.link import LinkOverhead
from tandem.comparison.links.link_settings import LinkSettings
from tandem.comparison.measuring.config import ComparisonConfig
from tandem.comparison.measuring.deployment import Endpoint
from tandem.comparison.measuring.json_form import decoded, encoded, read_text
from tandem.comparison.measuring.machine import Machine
from tandem.comparison.measuring.records import Failure, Measurement, Record

NAME = "records.jsonl"
FORMAT = 3  # incremented when a line changes its meaning or goes
UNENDED = "the run has not ended, or was killed"
LINES: Mapping[str, Mapping[str, Any]] = {  # kinds after the first line
    "servers": {"endpoints": tuple[Endpoint, ...]},
    "warm-up failure": {"architecture": str, "failure": Failure},
    "link": {"link": LinkSettings, "overhead": LinkOverhead},
    "record": {"record": Record},
    "calibration": {"architecture": str, "length": int, "measurement": Measurement},
    "margins": {"condition": str, "prompt": str, "trace": Measurement},
    "remark": {"text": str},
    "end": {"cut_short": str | None},
}


@dataclass
class RunData:
    config: ComparisonConfig
    machine: Machine
    started_at: str
    endpoints: tuple[Endpoint, ...] = ()
    warm_up_failures: dict[str, Failure] = field(default_factory=dict)
    links: dict[LinkSettings, LinkOverhead] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)
    # by architecture and draft tokens of a round
    calibrations: dict[str, dict[int, list[Measurement]]] = field(default_factory=dict)
    margins: dict[tuple[str, str], Measurement] = field(default_factory=dict)  # by condition and prompt
    remarks: list[str] = field(default_factory=list)
    ended: bool = False  # the run recorded its end
    cut_short: str | None = None  # why it ended early

    @property
    def planned(self) -> int:
        config = self.config
        alone = len(config.conditions) * len(config.prompts) * config.num_runs
        return max(len(self.endpoints), len(config.architectures)) * (
            alone + sum(load.requests for load in config.loads)
        )

    @property
    def missing(self) -> str | None:
        """Why measurements are missing; None if complete."""
        return self.cut_short if self.ended else UNENDED

    def add(self, kind: str, *values: Any) -> None:
        match kind, *values:
            case "servers", endpoints:
                self.endpoints = tuple(endpoints)
            case "warm-up failure", name, failure:
                self.warm_up_failures[name] = failure
            case "link", link, overhead:
                self.links[link] = overhead
            case "record", record:
                self.records.append(record)
            case "calibration", name, length, measurement:
                self.calibrations.setdefault(name, {}).setdefault(length, []).append(measurement)
            case "margins", condition, prompt, trace:
                self.margins[condition, prompt] = trace
            case "remark", text:
                self.remarks.append(text)
            case "end", cut_short:
                self.ended, self.cut_short = True, cut_short


class RecordLog:
    def __init__(self, measured: RunData) -> None:
        """Replaces an existing file. Raises OSError."""
        self.measured = measured
        self.path = measured.config.output_dir / NAME
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO | None = self.path.open("w", encoding="utf-8")
        started = {"format": FORMAT, "started_at": measured.started_at, "settings": measured.config}
        self._write("run", {**started, "machine": measured.machine})

    def __enter__(self) -> RecordLog:
        return self

    def __exit__(self, *error: object) -> None:
        if self._file:
            self._file.close()

    def add(self, kind: str, *values: Any) -> None:
        """Adds a line with the values of LINES in their order."""
        self.measured.add(kind, *values)
        self._write(kind, dict(zip(LINES[kind], values, strict=True)))

    def _write(self, kind: str, values: Mapping[str, Any]) -> None:
        """Writes and flushes a line; on a full disk only the file ends."""
        if self._file is None:
            return
        try:
            self._file.write(json.dumps({"kind": kind, **encoded(values)}, ensure_ascii=False) + "\n")
            self._file.flush()
        except OSError as error:
            with suppress(OSError):
                self._file.close()
            self._file = None
            self.measured.remarks.append(f"{self.path} ends early, it could not be written: {error}")


def read_records(path: Path, flag: str = "from-records") -> RunData:
    """Reads a run's records; the output folder is the file's. Raises a one-line ValueError."""
    lines = read_text(path, flag).split("\n")[:-1]  # an incomplete last line was being written when the run died
    number = 1
    try:
        head = json.loads((lines or [""])[0])
        if not isinstance(head, dict) or head.get("format") != FORMAT:
            raise ValueError(f"format {FORMAT} is needed")
        config = decoded(ComparisonConfig, {**head["settings"], "output_dir": path.parent})
        measured = RunData(config, decoded(Machine, head["machine"]), head["started_at"])
        for line in lines[1:]:
            number += 1
            found = json.loads(line)
            if (kind := found["kind"]) not in LINES:
                raise ValueError(f"kind {kind!r} is unknown")
            measured.add(kind, *(decoded(of, found[name]) for name, of in LINES[kind].items()))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        why = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{flag}: {path}, line {number}: not of a comparison's records: {why}") from None
    return measured
