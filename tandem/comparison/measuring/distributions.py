"""Summarizes a metric over requests like LLMPerf: linear percentiles, sample standard deviation."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

DISTRIBUTIONS: tuple[str, ...] = (  # metrics of a request
    "ttft_s",
    "tpot_s",
    "inter_token_latency_s",
    "end_to_end_latency_s",
    "request_output_throughput_token_per_s",
    "number_input_tokens",
    "number_output_tokens",
)


def ratio(numerator: float, denominator: float) -> float | None:
    """Returns the quotient, or None if it is not finite."""
    value = numerator / denominator if denominator else math.inf
    return value if math.isfinite(value) else None


PERCENTS = (25, 50, 75, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class MetricDistribution:
    """The distribution of a metric over requests; None without values."""

    p25: float | None = None
    p50: float | None = None
    p75: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    mean: float | None = None
    min: float | None = None
    max: float | None = None
    stddev: float | None = None


def distribution(values: Iterable[float | None]) -> MetricDistribution:
    """Summarizes the values other than None."""
    import numpy as np  # lazy: --help and the tables read names from this file

    known = [value for value in values if value is not None]
    if not known:
        return MetricDistribution()
    stddev = statistics.stdev(known) if len(known) > 1 else None
    found = np.percentile(known, PERCENTS).tolist()
    return MetricDistribution(*[*found, statistics.fmean(known), float(min(known)), float(max(known)), stddev])
