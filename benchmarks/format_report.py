"""Formats what is compared by format of weights: prompt processing, and whose tokens are whose."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rich.table import Table

from benchmarks.figures import Sample, identity
from benchmarks.formats import format_of
from benchmarks.prompt_speed import PromptSpeed


def prompt_table(speeds: Sequence[PromptSpeed]) -> Table:
    """Builds the rates of prompt processing, a row for each contender."""
    lengths = list(dict.fromkeys(speed.tokens for speed in speeds))
    table = Table(title="Prompts: tokens/s until the first token, median (ms)", title_justify="left")
    table.add_column("contender")
    for length in lengths:
        table.add_column(f"{length} tokens", justify="right")
    found = {(speed.contender, speed.tokens): speed for speed in speeds}
    for name in dict.fromkeys(speed.contender for speed in speeds):
        row = [found.get((name, length)) for length in lengths]
        table.add_row(name, *(f"{s.rate:.0f} ({1000 * s.tokens / s.rate:.1f})" if s else "-" for s in row))
    return table


def identity_table(samples: Sequence[Sample], ends: Collection[int]) -> Table:
    """Builds the share of tokens that are those of our plain decoding in the same format, a row for each contender."""
    title = "Tokens of our plain decoding in the same format, up to its first end of sequence"
    table = Table(title=title, title_justify="left")
    table.add_column("contender")
    for column in ("reference", "requests with the same tokens", "tokens before the first that differs"):
        table.add_column(column, justify="right")
    for name in dict.fromkeys(sample.contender for sample in samples):
        reference = format_of(name).plain
        found = identity(samples, name, reference, ends)
        if found and name != reference:
            table.add_row(name, reference, f"{found.same}/{found.requests}", f"{found.share:.1%}")
    return table
