"""Prints the tables that benchmarks share."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rich.table import Table

from benchmarks.figures import Sample, agreement, quantile


def contender_table(samples: Sequence[Sample], reference: str) -> Table:
    """Builds the percentiles of each contender, and how often its tokens equal those of `reference`."""
    table = Table(title="Each contender, ms per token end to end", title_justify="left")
    table.add_column("contender")
    for column in (
        "p25",
        "median",
        "p75",
        "tokens/s\nat median",
        "first token\nms",
        "ms per token\nafter it",
        f"tokens of\n{reference}",
    ):
        table.add_column(column, justify="right")
    for name in dict.fromkeys(sample.contender for sample in samples):
        mine = [sample for sample in samples if sample.contender == name]
        times = [sample.ms_per_token for sample in mine]
        later = [ms for sample in mine if (ms := sample.ms_per_later_token) is not None]
        same = agreement(samples, name, reference)
        table.add_row(
            name,
            *(f"{quantile(times, q):.1f}" for q in (0.25, 0.5, 0.75)),
            f"{1000 / statistics.median(times):.1f}",
            f"{1000 * statistics.median(sample.first_seconds for sample in mine):.0f}",
            f"{statistics.median(later):.1f}" if later else "-",
            "ref" if name == reference else f"{same.count}/{same.total}",
        )
    return table


def kind_table(samples: Sequence[Sample]) -> Table:
    """Builds the medians by kind of prompt."""
    names = list(dict.fromkeys(sample.contender for sample in samples))
    table = Table(title="Median ms per token by kind of prompt", title_justify="left")
    table.add_column("kind")
    for name in names:
        table.add_column(name.replace(" ", "\n", 1), justify="right")
    for kind in dict.fromkeys(sample.kind for sample in samples):
        medians = (
            statistics.median(s.ms_per_token for s in samples if s.kind == kind and s.contender == name)
            for name in names
        )
        table.add_row(kind, *(f"{median:.1f}" for median in medians))
    return table
