"""Builds what a report says under load: the decision, a table, and the rows of loads.csv."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from pathlib import Path

from tandem.comparison.measuring.distributions import DISTRIBUTIONS, STATISTICS
from tandem.comparison.measuring.loads import Load
from tandem.comparison.report import formatting as fmt
from tandem.comparison.report import reading
from tandem.comparison.report.blocks import Cell, Column, Table, Text, bullets, numbers, paragraph, table, words
from tandem.comparison.report.reading import JSON
from tandem.comparison.report.tables import IDENTICAL, Measure, identical, measured_cells, statistic_ms

THROUGHPUT = "mean_output_throughput_token_per_s"
LOAD_MEASURES = (
    Measure("tokens/s", "tokens\n/s", lambda of: of[THROUGHPUT], 1, max),
    Measure("requests/min", "requests\n/min", lambda of: of["num_completed_requests_per_minute"], 1, max),
    Measure("TTFT p50, ms", "TTFT\np50 ms", statistic_ms("ttft_s", "p50"), 1, min),
    Measure("TTFT p99, ms", "", statistic_ms("ttft_s", "p99"), 1, min),
    Measure("TPOT p50, ms", "TPOT\np50 ms", statistic_ms("tpot_s", "p50"), 2, min),
    Measure("TPOT p99, ms", "", statistic_ms("tpot_s", "p99"), 2, min),
    Measure("end to end p50, ms", "E2E\np50 ms", statistic_ms("end_to_end_latency_s", "p50"), 0, min),
)
FIGURES = (
    "num_requests_started",
    "num_completed_requests",
    "number_errors",
    "error_rate",
    "seconds",
    "num_completed_requests_per_minute",
    THROUGHPUT,
)


@dataclass(frozen=True, slots=True)
class Row:
    """One architecture under one load. `of`: its figures there and its summary with the distributions."""

    point: JSON
    architecture: str
    of: JSON

    @property
    def is_open(self) -> bool:
        return self.point["rate"] is not None

    @property
    def load(self) -> str:
        return str(Load(*(self.point[key] for key in ("requests", "concurrency", "rate"))))


def rows_of(comparison: JSON) -> list[Row]:
    """Returns every architecture under every load; empty if there was no load."""
    found = comparison.get("under_load")
    by_name = {condition["name"]: condition["architectures"] for condition in comparison["conditions"]}
    return [
        Row(point, name, {**by_name[point["condition"]][name], **figures})
        for point in (found["points"] if found else ())
        for name, figures in point["architectures"].items()
    ]


def load_decisions(comparison: JSON) -> Text | None:
    """Returns the decision under each load; None if there was no load."""
    if not (found := comparison.get("under_load")):
        return None
    sentences = [point["best"]["sentence"] for point in found["points"] if point["best"]]
    undecided = "No decision under load: fewer than two architectures answered all requests of any load."
    return bullets(found["headline"], sentences) if sentences else paragraph(undecided)


def load_table(comparison: JSON) -> Table | None:
    """LLMPerf's figures of every architecture under every load, the best of each load marked; None without loads."""
    rows: list[list[Cell | str]] = []
    if not (loaded := rows_of(comparison)):
        return None
    for load in dict.fromkeys(row.load for row in loaded):
        group = [row for row in loaded if row.load == load]
        columns = [measured_cells(measure, [row.of for row in group]) for measure in LOAD_MEASURES]
        rows.append([f"{load}:"])
        for row, *cells in zip(group, *columns, strict=True):
            chosen = row.point["best"] and row.point["best"]["architecture"] == row.architecture
            name = Cell(fmt.name(row.architecture), brief=f"{'*' if chosen else ' '} {row.architecture}")
            errors = row.of["number_errors"]
            failed = Cell(str(errors), tone="bad" if errors else "")
            rows.append([load if row is group[0] else "", name, *cells, failed, identical(row.of)])
    measures = [Column(measure.page, brief=measure.terminal) for measure in LOAD_MEASURES]
    return table(
        f"Under load{_traffic(comparison)}",
        [Column("load", False, brief=""), *words("architecture"), *measures, *numbers("errors"), IDENTICAL],
        rows,
        "Bold: the best of its load. tokens/s and requests/min: of completed requests, over the time from the first"
        " request sent to the last one ended (LLMPerf's mean_output_throughput_token_per_s and"
        " num_completed_requests_per_minute). At once: so many users, each of whom sends the next request when"
        " answered. requests/s: arrivals, Poisson unless recorded, the same for every architecture. Identical: to plain"
        " decoding with the fewest requests beside it.",
        (
            "Under load",
            "* the most tokens/s, and the least latency of those within 3 %; identical: to plain decoding alone",
        ),
    )


def _traffic(comparison: JSON) -> str:
    """Describes the requests of the loads: lengths, and the seed of arrivals."""
    settings, points, parts = comparison["settings"], comparison["under_load"]["points"], []
    for what in ("input", "output"):
        if (mean := settings.get(f"mean_{what}_tokens")) is not None:
            parts.append(f"{mean} ± {settings.get(f'stddev_{what}_tokens') or 0} {what} tokens")
    parts.append(f"{points[0]['requests']} requests each")
    if any(point["rate"] is not None for point in points):
        pattern = settings.get("arrivals")
        parts.append(
            f"arrivals of {Path(pattern).name}"
            if pattern
            else f"arrivals of seed {reading.base(comparison)['sampling']['seed']}"
        )
    return "".join(f", {part}" for part in parts)


def loads_as_csv(comparison: JSON) -> str:
    """Returns one row for each load and architecture, with LLMPerf's names."""
    text = io.StringIO()
    distributions = [(metric, statistic) for metric in DISTRIBUTIONS for statistic in STATISTICS]
    heads = ["condition", "concurrency", "rate", "architecture", *FIGURES, "identical", "compared"]
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*heads, *(f"{metric}_{statistic}" for metric, statistic in distributions)])
    for row in rows_of(comparison):
        same = row.of["identical_to_autoregressive"] or {"count": None, "total": None}
        point = [row.point[key] for key in ("condition", "concurrency", "rate")]
        values = [row.of[metric][statistic] for metric, statistic in distributions]
        figures = [row.of[key] for key in FIGURES]
        writer.writerow([*point, row.architecture, *figures, same["count"], same["total"], *values])
    return text.getvalue()
