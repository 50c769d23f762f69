"""Defines the result of a comparison and writes comparison.json and comparison.csv.

comparison.schema.json describes comparison.json.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from tandem.comparison.analysis.capacity import Capacity
from tandem.comparison.analysis.decision import Decision
from tandem.comparison.analysis.findings import Theory, theory_as_json
from tandem.comparison.analysis.summary import Summary
from tandem.comparison.analysis.under_load import UnderLoad
from tandem.comparison.analysis.verdicts import Statement, Verdict
from tandem.comparison.measuring.attempt import tried
from tandem.comparison.measuring.conditions import BASE, LINK, Condition
from tandem.comparison.measuring.deployment import baseline_of
from tandem.comparison.measuring.json_form import encoded
from tandem.comparison.measuring.machine_load import MachineLoad
from tandem.comparison.measuring.record_log import RunData
from tandem.comparison.measuring.records import CAUSES, HEAD, Measurement, Record, record_as_json
from tandem.comparison.report.reading import JSON, SCHEMA_VERSION
from tandem.rpc.credentials import on_this_machine


@dataclass
class Comparison(RunData):
    """The result of a comparison: what was measured, and what follows from it. `print` shows the tables.

    conditions: those that were measured, the base first. summaries: by condition.
    """

    conditions: Sequence[Condition] = ()
    summaries: Mapping[str, Sequence[Summary]] = field(default_factory=dict)
    theory: Theory | None = None
    decision: Decision | None = None
    under_load: UnderLoad | None = None
    capacity: Capacity | None = None
    verdicts: Sequence[Verdict] = ()
    statements: Sequence[Statement] = ()
    caveats: Sequence[str] = ()

    def __str__(self) -> str:
        """The tables and remarks that the command line prints, without colors."""
        from rich.console import Console

        from tandem.comparison.report.terminal import TABLE_WIDTH, print_comparison

        text = io.StringIO()
        print_comparison(comparison_as_json(self), Console(file=text, width=TABLE_WIDTH))
        return text.getvalue()

    @property
    def failed(self) -> tuple[Record, ...]:
        return tuple(record for record in self.records if record.error)

    @property
    def link(self) -> str:
        """Describes the links: emulated ones are called so, and servers beyond this machine's loopback are named."""
        rtts = [f"{condition.link}" for condition in self.conditions if condition.varies in (BASE, LINK)]
        if self.conditions[0].link.rtt_ms is not None:
            return f"emulated ({'; '.join(rtts)})"
        given = (e for e in self.endpoints if e.log is None)
        outside = (e for e in given if not on_this_machine(e.address.rpartition(":")[0]))
        elsewhere = [f"{e.architecture.name} at {e.address}" for e in outside]
        return "loopback" if not elsewhere else "loopback, except " + ", ".join(elsewhere)


def comparison_as_json(comparison: Comparison) -> dict[str, Any]:
    """Returns comparison.json. A part that cannot be computed is null, and a remark says why."""
    remarks, theory = list(comparison.remarks), comparison.theory
    said = tried(remarks, "Theory beside measurement", lambda: theory_as_json(theory) if theory else None, None)
    missing, measured = comparison.missing, len(comparison.records)
    plain = baseline_of(list(comparison.endpoints))  # of speedups; outputs are compared with `autoregressive`
    return {
        "schema_version": SCHEMA_VERSION,
        "started_at": comparison.started_at,
        "partial": {"reason": missing, "measured": measured, "planned": comparison.planned} if missing else None,
        "settings": encoded(comparison.config),
        "link": comparison.link,
        "machine": encoded(comparison.machine),
        "versions": encoded(comparison.versions),
        "baseline": {"architecture": plain.architecture.name, "plain_width": plain.model.plain_width}
        if plain
        else None,
        "remarks": remarks,
        "warm_up_failures": encoded(comparison.warm_up_failures),
        "servers": {
            each.architecture.name: {
                "service": each.architecture.service,
                "address": each.address,
                "started_here": each.log is not None,
                "model": encoded(each.model),
            }
            for each in comparison.endpoints
        },
        "conditions": [_condition_as_json(comparison, condition) for condition in comparison.conditions],
        "theory": said,
        "decision": encoded(comparison.decision),
        "under_load": encoded(comparison.under_load),
        "capacity": encoded(comparison.capacity),
        "verdicts": encoded(comparison.verdicts),
        "statements": encoded(comparison.statements),
        "caveats": list(comparison.caveats),
        "records": [record_as_json(record) for record in comparison.records],
    }


def _condition_as_json(comparison: Comparison, condition: Condition) -> dict[str, Any]:
    measured = comparison.links.get(condition.link)
    return {
        "name": condition.name,
        "varies": condition.varies,
        "link": {
            "kind": "direct" if condition.link.rtt_ms is None else "emulated",
            "rtt_ms": 1000 * condition.link.seconds,
            "bandwidth_mbps": condition.link.bandwidth_mbps,
            "but": str(condition.link.but),
            "direct_round_trip_s": measured.direct_p50_s if measured else None,
            "round_trip_s": measured.link_p50_s if measured else None,
            "added_s": measured.added_s if measured and condition.link.but.predictable else None,
        },
        "sampling": encoded(condition.request.sampling),
        "rule": condition.request.rule.value,
        "load": encoded(condition.load),
        "architectures": {summary.architecture: encoded(summary) for summary in comparison.summaries[condition.name]},
    }


def text_of(comparison: JSON) -> str:
    """Returns the text of comparison.json."""
    return json.dumps(comparison, indent=2, allow_nan=False, ensure_ascii=False) + "\n"


REHEARSED = "rehearsed"
"""The last column: the name of the step times that servers took."""
CSV_COLUMNS: tuple[str, ...] = (
    *HEAD,
    *(f.name for f in fields(Measurement) if f.name != "seconds_by_cause"),
    *(f"{cause}_seconds" for cause in CAUSES),
    "error_code",
    "error_message",
    *(f"machine_{f.name}" for f in fields(MachineLoad)),
    REHEARSED,
)


def comparison_as_csv(records: Sequence[Record], rehearsed: str | None = None) -> str:
    """Returns one row per record. Lists are JSON inside a cell; cells without a measurement are empty.

    `rehearsed`: the name of the step times that servers took.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, CSV_COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows({**_csv_row(record), REHEARSED: rehearsed} for record in records)
    return text.getvalue()


def _csv_row(record: Record) -> dict[str, Any]:
    row = record_as_json(record)
    seconds: dict[str, float] = row.pop("seconds_by_cause") or {}
    error: dict[str, str] = row.pop("error") or {}
    load: dict[str, float] = row.pop("machine_load") or {}
    return {
        **{key: json.dumps(value) if isinstance(value, list) else value for key, value in row.items()},
        **{f"{cause}_seconds": seconds.get(cause) for cause in CAUSES},
        **{f"error_{key}": value for key, value in error.items()},
        **{f"machine_{key}": value for key, value in load.items()},
    }
