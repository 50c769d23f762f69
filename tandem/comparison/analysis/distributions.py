"""Summarizes a metric over requests, as LLMPerf does: linear percentiles, a sample's standard deviation."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, fields

DISTRIBUTIONS: tuple[str, ...] = (
    "ttft_s",
    "tpot_s",
    "inter_token_latency_s",
    "end_to_end_latency_s",
    "request_output_throughput_token_per_s",
    "number_input_tokens",
    "number_output_tokens",
)
"""The metrics of a request whose distributions are reported."""

PERCENTS = (25, 50, 75, 90, 95, 99)
"""The percentiles of a Distribution."""


@dataclass(frozen=True, slots=True)
class MetricDistribution:
    """The distribution of a metric over requests; every value is None if nothing was measured."""

    p25: float | None
    p50: float | None
    p75: float | None
    p90: float | None
    p95: float | None
    p99: float | None
    mean: float | None
    min: float | None
    max: float | None
    stddev: float | None


def distribution(values: Iterable[float | None]) -> MetricDistribution:
    """Summarizes the values that are not None."""
    import numpy as np  # lazy: --help and the tables read names from this file

    known = [value for value in values if value is not None]
    if not known:
        return MetricDistribution(*[None] * len(fields(MetricDistribution)))
    return MetricDistribution(
        **{
            f"p{percent}": float(value) for percent, value in zip(PERCENTS, np.percentile(known, PERCENTS), strict=True)
        },
        mean=statistics.fmean(known),
        min=min(known),
        max=max(known),
        stddev=statistics.stdev(known) if len(known) > 1 else None,
    )
