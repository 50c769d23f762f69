"""Formats tables for a terminal without a library, which a Trainium host need not have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The table's lines. The first column and one without a heading are left-aligned, the others right-aligned."""
    widths = [max(len(row[column]) for row in (heads, *rows)) for column in range(len(heads))]
    for index, row in enumerate((heads, *rows)):
        cells = [
            cell.ljust(width) if column == 0 or not heads[column] else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield ("  " + "  ".join(cells)).rstrip()
        if index == 0:
            yield "  " + "─" * (sum(widths) + 2 * (len(widths) - 1))
