"""Defines the result of a comparison and writes comparison.json, comparison.csv and loads.csv.

comparison.schema.json describes comparison.json.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from tandem.comparison.analysis.decision import Decision
from tandem.comparison.analysis.findings import Theory, theory_as_json
from tandem.comparison.analysis.summary import Summary, summary_as_json
from tandem.comparison.analysis.under_load import UnderLoad, under_load_as_json
from tandem.comparison.links.overhead import LinkOverhead
from tandem.comparison.measuring.conditions import BASE, LINK, Condition, LinkChoice
from tandem.comparison.measuring.config import ComparisonConfig, settings_as_json
from tandem.comparison.measuring.deployment import Endpoint, baseline_of
from tandem.comparison.measuring.environment import Machine, Versions
from tandem.comparison.measuring.records import CAUSES, HEAD, Failure, Measurement, Record, record_as_json
from tandem.comparison.report.attempt import Attempts
from tandem.comparison.report.comparison_file import SCHEMA_VERSION
from tandem.comparison.report.load_tables import loads_as_csv
from tandem.comparison.report.write import write_atomically


@dataclass(frozen=True, slots=True)
class ConditionResult:
    """The results under one condition; the first of a comparison is the base."""

    condition: Condition
    summaries: tuple[Summary, ...]
    link: LinkOverhead | None = None


@dataclass(frozen=True, slots=True)
class Partial:
    """Why only `measured` of the `planned` requests were measured."""

    reason: str
    measured: int
    planned: int

    def __str__(self) -> str:
        return f"{self.reason}; {self.measured} of {self.planned or 'an unknown number of'} requests were measured"


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison: configuration, records, summaries, theory, decisions. `print` shows the tables."""

    config: ComparisonConfig
    endpoints: tuple[Endpoint, ...]
    records: tuple[Record, ...]
    results: tuple[ConditionResult, ...]
    machine: Machine
    versions: Versions
    started_at: str
    remarks: tuple[str, ...] = ()
    warm_up_failures: tuple[tuple[str, Failure], ...] = ()
    theory: Theory | None = None
    decision: Decision | None = None
    under_load: UnderLoad | None = None
    partial: Partial | None = None

    def __str__(self) -> str:
        """The tables and remarks that the command line prints."""
        from tandem.comparison.report.terminal import as_text

        return as_text(self)

    @property
    def base(self) -> ConditionResult:
        return self.results[0]

    @property
    def failed(self) -> tuple[Record, ...]:
        return tuple(record for record in self.records if record.error)

    @property
    def link(self) -> str:
        """Describes the links: emulated ones are called so, and servers beyond this machine's loopback are named."""
        rtts = [f"{result.condition.link}" for result in self.results if result.condition.varies in (BASE, LINK)]
        if self.base.condition.link.rtt_ms is not None:
            return f"{self.config.link} ({'; '.join(rtts)})"
        elsewhere = [f"{e.architecture.name} at {e.address}" for e in self.endpoints if not _on_loopback(e.address)]
        return "loopback" if not elsewhere else "loopback, except " + ", ".join(elsewhere)


def _on_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    return host in ("localhost", "::1") or host.startswith("127.")


def comparison_as_json(comparison: Comparison) -> dict[str, Any]:
    """Returns comparison.json. A part that cannot be computed is null, and a remark says why."""
    attempts, theory, decision = Attempts(), comparison.theory, comparison.decision
    said = attempts.of("Theory beside measurement", lambda: theory_as_json(theory) if theory else None, None)
    found = {
        "schema_version": SCHEMA_VERSION,
        "started_at": comparison.started_at,
        "partial": asdict(comparison.partial) if comparison.partial else None,
        "settings": settings_as_json(comparison.config),
        "link": comparison.link,
        "machine": asdict(comparison.machine),
        "versions": asdict(comparison.versions),
        "baseline": _baseline_as_json(comparison.endpoints),
        "remarks": [*comparison.remarks, *attempts.remarks],
        "warm_up_failures": {name: asdict(failure) for name, failure in comparison.warm_up_failures},
        "servers": {e.architecture.name: _endpoint_as_json(e) for e in comparison.endpoints},
        "conditions": [_condition_as_json(result, comparison.config.link) for result in comparison.results],
        "theory": said,
        "decision": asdict(decision) if decision else None,
        "under_load": under_load_as_json(comparison.under_load) if comparison.under_load else None,
        "records": [record_as_json(record) for record in comparison.records],
    }
    return {key: _finite(value) for key, value in found.items()}


def _finite(value: Any) -> Any:
    """Replaces infinities and NaN by None, since JSON has neither."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _baseline_as_json(endpoints: Sequence[Endpoint]) -> dict[str, Any] | None:
    """Returns the server that speedups refer to; outputs are always compared with `autoregressive`."""
    endpoint = baseline_of(list(endpoints))
    if endpoint is None:
        return None
    return {"architecture": endpoint.architecture.name, "plain_width": endpoint.model.plain_width}


def _condition_as_json(result: ConditionResult, kind: str) -> dict[str, Any]:
    condition = result.condition
    return {
        "name": condition.name,
        "varies": condition.varies,
        "link": _link_as_json(condition.link, kind, result.link),
        "sampling": asdict(condition.sampling),
        "rule": condition.rule.value,
        "load": asdict(condition.load) if condition.load else None,
        "architectures": {summary.architecture: summary_as_json(summary) for summary in result.summaries},
    }


def _link_as_json(link: LinkChoice, kind: str, measured: LinkOverhead | None) -> dict[str, Any]:
    return {
        "kind": "direct" if link.rtt_ms is None else kind,
        "rtt_ms": 1000 * link.seconds,
        "bandwidth_mbps": link.bandwidth_mbps,
        "direct_round_trip_s": measured.direct_p50_s if measured else None,
        "round_trip_s": measured.link_p50_s if measured else None,
        "added_s": measured.added_s if measured else None,
    }


def _endpoint_as_json(endpoint: Endpoint) -> dict[str, Any]:
    return {
        "service": endpoint.architecture.service,
        "address": endpoint.address,
        "started_here": endpoint.log is not None,
        "model": asdict(endpoint.model),
    }


CSV_COLUMNS: tuple[str, ...] = (
    *HEAD,
    *(f.name for f in fields(Measurement) if f.name != "seconds_by_cause"),
    *(f"{cause}_seconds" for cause in CAUSES),
    "error_code",
    "error_message",
)


def comparison_as_csv(records: Sequence[Record]) -> str:
    """Returns one row per record. Lists are JSON inside a cell; cells without a measurement are empty."""
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


def write_json(as_json: Mapping[str, Any], folder: Path) -> Path:
    text = json.dumps(as_json, indent=2, allow_nan=False, ensure_ascii=False)
    return write_atomically(folder / "comparison.json", text + "\n")


def write_csv(records: Sequence[Record], folder: Path) -> Path:
    return write_atomically(folder / "comparison.csv", comparison_as_csv(records))


def write_loads(as_json: Mapping[str, Any], folder: Path) -> Path:
    return write_atomically(folder / "loads.csv", loads_as_csv(as_json))
