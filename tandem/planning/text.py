"""Tables for a terminal without a library: a Trainium host has no reason to hold one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Figures to the right; the first column to the left, and a last one without a heading too."""
    widths = [max(len(row[column]) for row in (heads, *rows)) for column in range(len(heads))]
    for index, row in enumerate((heads, *rows)):
        cells = [
            cell.ljust(width) if column == 0 or not heads[column] else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield ("  " + "  ".join(cells)).rstrip()
        if index == 0:
            yield "  " + "─" * (sum(widths) + 2 * (len(widths) - 1))
