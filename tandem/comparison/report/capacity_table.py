"""Builds what a report says of capacity: how many clients one target serves, by architecture."""

from __future__ import annotations

from collections.abc import Iterator

from tandem.comparison.report import formatting as fmt
from tandem.comparison.report.blocks import Cell, Column, Table, Text, bullets, numbers, table, words
from tandem.comparison.report.reading import JSON
from tandem.comparison.report.tables import best_cells, named

LAW = "1 + g t_d / t_v (arXiv 2606.25091)"


def capacity_lines(comparison: JSON) -> Iterator[str]:
    """Yields a sentence for what each architecture serves, and one on the law; none without a capacity."""
    found = comparison.get("capacity")
    if not found:
        return
    bound = fmt.ms(found["bound_s"], 0)
    for one in found["served"]:
        name, tokens = fmt.name_in_sentence(one["architecture"]), fmt.number(one["tokens_per_second"], 0)
        if not one["clients"]:
            yield f"{name} does not serve one client at {bound} a token."
        else:
            yield f"{name} serves {_clients(one)} clients at {bound} a token (p95): {tokens} tokens/s."
    if found["gain"] is not None:
        law = "" if found["law"] is None else f"; the law {LAW} says {fmt.times(found['law'])}"
        gain = fmt.times(found["gain"])
        yield f"Drafts of the clients' own serve {gain} the clients of drafts beside the target{law}."


def capacity_text(comparison: JSON) -> Text | None:
    lines = [fmt.capitalised(line) for line in capacity_lines(comparison)]
    return bullets("How many clients one target serves", lines) if lines else None


def capacity_table(comparison: JSON) -> Table | None:
    """The clients within the bound, and the 95th percentile at every number of clients that was measured."""
    found = comparison.get("capacity")
    if not found:
        return None
    served = found["served"]
    counts = sorted({point["clients"] for one in served for point in one["points"]})
    clients = best_cells([Cell(_clients(one)) for one in served], [one["clients"] for one in served], max)
    rates = [one["tokens_per_second"] for one in served]
    cells = best_cells([Cell(fmt.number(rate, 1)) for rate in rates], rates, max)
    rows = [
        [named(one["architecture"]), most, rate, *_times(one, counts, found["bound_s"])]
        for one, most, rate in zip(served, clients, cells, strict=True)
    ]
    return table(
        f"Clients of one target at {fmt.ms(found['bound_s'], 0)} a token, and the 95th percentile in milliseconds",
        [
            *words("architecture"),
            *numbers("clients", "tokens/s"),
            *(Column(f"with {count}", brief=f"{count}") for count in counts),
        ],
        rows,
        "Clients are interpolated between measured numbers of them; each has a draft of its own where drafts are apart."
        " tokens/s: of them together, so of one target's device each second.",
    )


def _times(one: JSON, counts: list[int], bound_s: float) -> list[Cell]:
    known = {point["clients"]: point["p95_s"] for point in one["points"]}
    return [
        Cell(fmt.milliseconds(known.get(count)), tone="bad" if known.get(count, 0.0) > bound_s else "")
        for count in counts
    ]


def _clients(one: JSON) -> str:
    return f"{'≥ ' if one['at_least'] else ''}{one['clients']:.1f}".removesuffix(".0")
