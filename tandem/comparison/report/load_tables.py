"""Builds what a report says under load: the decision, a table, and the rows of loads.csv."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from tandem.comparison.analysis.distributions import DISTRIBUTIONS, MetricDistribution
from tandem.comparison.report import formatting as fmt
from tandem.comparison.report import reading
from tandem.comparison.report.blocks import Block, Bullets, Cell, Column, Paragraph, Table, table
from tandem.comparison.report.reading import JSON
from tandem.comparison.report.tables import best_cells

STATISTICS = tuple(field.name for field in fields(MetricDistribution))
FIGURES = (
    "num_requests_started",
    "num_completed_requests",
    "number_errors",
    "error_rate",
    "seconds",
    "num_completed_requests_per_minute",
    "mean_output_throughput_token_per_s",
)


@dataclass(frozen=True, slots=True)
class Row:
    """One architecture under one load: its figures, and its summary with the distributions."""

    point: JSON
    architecture: str
    figures: JSON
    summary: JSON

    @property
    def load(self) -> str:
        return load_name(self.point)


def load_name(point: JSON) -> str:
    return f"{point['concurrency']} at once" if point["rate"] is None else f"{point['rate']:g} requests/s"


def rows_of(comparison: JSON) -> list[Row]:
    """Returns every architecture under every load; empty if there was no load."""
    found = comparison.get("under_load")
    by_name = {condition["name"]: condition["architectures"] for condition in comparison["conditions"]}
    return [
        Row(point, name, figures, by_name[point["condition"]][name])
        for point in (found["points"] if found else ())
        for name, figures in point["architectures"].items()
    ]


Value = Callable[[Row], float | None]


@dataclass(frozen=True, slots=True)
class Measure:
    heading: str
    value: Value
    digits: int
    better: Callable[..., float]


def _time(metric: str, statistic: str) -> Value:
    def value(row: Row) -> float | None:
        seconds: float | None = row.summary[metric][statistic]
        return None if seconds is None else 1000 * seconds

    return value


def _figure(key: str) -> Value:
    def value(row: Row) -> float | None:
        found: float | None = row.figures[key]
        return found

    return value


MEASURES = (
    Measure("tokens/s", _figure("mean_output_throughput_token_per_s"), 1, max),
    Measure("requests/min", _figure("num_completed_requests_per_minute"), 1, max),
    Measure("TTFT p50, ms", _time("ttft_s", "p50"), 1, min),
    Measure("TTFT p99, ms", _time("ttft_s", "p99"), 1, min),
    Measure("TPOT p50, ms", _time("tpot_s", "p50"), 2, min),
    Measure("TPOT p99, ms", _time("tpot_s", "p99"), 2, min),
    Measure("end to end p50, ms", _time("end_to_end_latency_s", "p50"), 0, min),
)


def load_blocks(comparison: JSON) -> Sequence[Block]:
    """Returns the decision under load and its table."""
    found = comparison.get("under_load")
    if not found:
        return [Paragraph("Requests were sent one at a time: no load was measured (--concurrency, --rate).")]
    sentences = [point["best"]["sentence"] for point in found["points"] if point["best"]]
    decided: Block = (
        Bullets(found["headline"], tuple(sentences))
        if sentences
        else Paragraph("No decision under load: fewer than two architectures answered all requests of any load.")
    )
    return [decided, load_table(comparison)]


def load_table(comparison: JSON) -> Table:
    """LLMPerf's figures of every architecture under every load; the best of each load is marked."""
    rows = rows_of(comparison)
    cells: list[list[Cell | str]] = []
    for load in dict.fromkeys(row.load for row in rows):
        group = [row for row in rows if row.load == load]
        columns = [
            best_cells([fmt.number(m.value(row), m.digits) for row in group], [m.value(r) for r in group], m.better)
            for m in MEASURES
        ]
        names = [Cell(load), *(Cell("") for _ in group[1:])]
        cells += [
            [name, fmt.name(row.architecture), *measured, str(row.figures["number_errors"]), identical(row)]
            for name, row, *measured in zip(names, group, *columns, strict=True)
        ]
    heads = [Column("load", False), Column("architecture", False), *(Column(m.heading) for m in MEASURES)]
    return table(
        f"Under load{setting(comparison)}",
        [*heads, Column("errors"), Column("identical outputs")],
        cells,
        "Bold: the best of its load. tokens/s and requests/min: of completed requests, over the time from the first"
        " request sent to the last one ended (LLMPerf's mean_output_throughput_token_per_s and"
        " num_completed_requests_per_minute). At once: so many users, each of whom sends the next request when"
        " answered. requests/s: Poisson arrivals, the same for every architecture. Identical: to plain decoding with"
        " the fewest requests beside it.",
    )


def setting(comparison: JSON) -> str:
    """Describes the requests of the loads: lengths, and the seed of arrivals."""
    settings = comparison["settings"]
    parts = []
    for what in ("input", "output"):
        mean, stddev = settings.get(f"mean_{what}_tokens"), settings.get(f"stddev_{what}_tokens")
        if mean is not None:
            parts.append(f"{mean} ± {stddev or 0} {what} tokens")
    points = comparison["under_load"]["points"]
    parts.append(f"{points[0]['requests']} requests each")
    if any(point["rate"] is not None for point in points):
        parts.append(f"arrivals of seed {reading.base(comparison)['sampling']['seed']}")
    return "".join(f", {part}" for part in parts)


def identical(row: Row) -> str:
    found = row.summary["identical_to_autoregressive"]
    return f"{found['count']}/{found['total']}" if found and found["total"] else fmt.MISSING


def loads_as_csv(comparison: Mapping[str, Any]) -> str:
    """Returns one row for each load and architecture, with LLMPerf's names."""
    text = io.StringIO()
    distributions = [(metric, statistic) for metric in DISTRIBUTIONS for statistic in STATISTICS]
    heads = ["condition", "concurrency", "rate", "architecture", *FIGURES, "identical", "compared"]
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*heads, *(f"{metric}_{statistic}" for metric, statistic in distributions)])
    for row in rows_of(comparison):
        same = row.summary["identical_to_autoregressive"] or {"count": None, "total": None}
        point = [row.point[key] for key in ("condition", "concurrency", "rate")]
        figures = [row.figures[key] for key in FIGURES]
        values = [row.summary[metric][statistic] for metric, statistic in distributions]
        writer.writerow([*point, row.architecture, *figures, same["count"], same["total"], *values])
    return text.getvalue()
