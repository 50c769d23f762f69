"""The files of a comparison: comparison.json and comparison.csv. What the terminal shows is in comparison/table.py."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from comparison.config import ComparisonConfig
from comparison.deployment import Endpoint, baseline_of
from comparison.environment import Machine, Versions
from comparison.records import CAUSES, Failure, Measurement, Record, record_as_json
from comparison.summary import Summary, summary_as_json

SCHEMA_VERSION = 1
"""Grows when a key changes its meaning or goes away; new keys leave it."""


@dataclass(frozen=True)
class Comparison:
    """Everything that was configured, found and measured."""

    config: ComparisonConfig
    endpoints: tuple[Endpoint, ...]
    records: tuple[Record, ...]
    summaries: tuple[Summary, ...]
    machine: Machine
    versions: Versions
    started_at: str
    remarks: tuple[str, ...] = ()
    warm_up_failures: tuple[tuple[str, Failure], ...] = ()

    @property
    def failed(self) -> tuple[Record, ...]:
        return tuple(record for record in self.records if record.error)

    @property
    def link(self) -> str:
        """Every hop that was not set up on this machine's loopback is named."""
        elsewhere = [f"{e.architecture.name} at {e.address}" for e in self.endpoints if not _on_loopback(e.address)]
        return "loopback" if not elsewhere else "loopback, except " + ", ".join(elsewhere)


def _on_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    return host in ("localhost", "::1") or host.startswith("127.")


def comparison_as_json(comparison: Comparison) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "started_at": comparison.started_at,
        "settings": settings_as_json(comparison.config),
        "link": comparison.link,
        "machine": asdict(comparison.machine),
        "versions": asdict(comparison.versions),
        "baseline": _baseline_as_json(comparison.endpoints),
        "remarks": list(comparison.remarks),
        "warm_up_failures": {name: asdict(failure) for name, failure in comparison.warm_up_failures},
        "architectures": {
            summary.architecture: {**_endpoint_as_json(comparison.endpoints, summary.architecture)}
            | summary_as_json(summary)
            for summary in comparison.summaries
        },
        "records": [record_as_json(record) for record in comparison.records],
    }


def settings_as_json(config: ComparisonConfig) -> dict[str, Any]:
    settings = {f.name: getattr(config, f.name) for f in fields(config)}
    return {
        **settings,
        "output_dir": str(config.output_dir),
        "connect": dict(config.connect),
        "sampling": asdict(config.sampling),
        "rule": config.rule.value,
        "prompts": [asdict(prompt) for prompt in config.prompts],
    }


def _baseline_as_json(endpoints: Sequence[Endpoint]) -> dict[str, Any] | None:
    """Which server speedups are quoted against; outputs are compared with `autoregressive` in any case."""
    endpoint = baseline_of(list(endpoints))
    if endpoint is None:
        return None
    return {"architecture": endpoint.architecture.name, "plain_width": endpoint.model.plain_width}


def _endpoint_as_json(endpoints: Sequence[Endpoint], architecture: str) -> dict[str, Any]:
    found = [endpoint for endpoint in endpoints if endpoint.architecture.name == architecture]
    if not found:
        return {}
    endpoint = found[0]
    return {
        "service": endpoint.architecture.service,
        "address": endpoint.address,
        "started_here": endpoint.log is not None,
        "model": asdict(endpoint.model),
    }


CSV_COLUMNS: tuple[str, ...] = (
    "architecture",
    "prompt",
    "workload",
    "run",
    *(f.name for f in fields(Measurement) if f.name != "seconds_by_cause"),
    *(f"{cause}_seconds" for cause in CAUSES),
    "error_code",
    "error_message",
)


def comparison_as_csv(records: Sequence[Record]) -> str:
    """One row per record; lists are JSON inside a cell, what was not measured is an empty cell."""
    text = io.StringIO()
    writer = csv.DictWriter(text, CSV_COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(_csv_row(record) for record in records)
    return text.getvalue()


def _csv_row(record: Record) -> dict[str, Any]:
    row = record_as_json(record)
    seconds: dict[str, float] = row.pop("seconds_by_cause") or {}
    error: dict[str, str] = row.pop("error") or {}
    return {
        **{key: json.dumps(value) if isinstance(value, list | tuple) else value for key, value in row.items()},
        **{f"{cause}_seconds": seconds.get(cause) for cause in CAUSES},
        "error_code": error.get("code"),
        "error_message": error.get("message"),
    }


def write_files(comparison: Comparison) -> tuple[Path, ...]:
    folder = comparison.config.output_dir
    folder.mkdir(parents=True, exist_ok=True)
    as_json = json.dumps(comparison_as_json(comparison), indent=2, allow_nan=False, ensure_ascii=False)
    contents = {"comparison.json": as_json + "\n", "comparison.csv": comparison_as_csv(comparison.records)}
    return tuple(write_atomically(folder / name, text) for name, text in contents.items())


def write_atomically(path: Path, text: str) -> Path:
    """Readers see the old file or the new one, never half of one."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)
    return path
