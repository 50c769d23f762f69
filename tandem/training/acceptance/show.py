"""Prints the results of a pair as tables."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from tandem.comparison.analysis.metrics import ratio
from tandem.training.acceptance.measure import ALL, DrafterFigures, PairMeasurement


def print_measured(found: PairMeasurement, console: Console) -> None:
    how = (
        "greedy" if found.sampling.greedy else f"temperature {found.sampling.temperature:g}, seed {found.sampling.seed}"
    )
    console.print(_agreement(found))
    console.print(_rounds(found))
    console.print(_lengths(found))
    console.print(
        f"target {found.target}, draft {found.draft or 'none'}; {found.dtype} on {found.device}; {how};"
        f" {sum(found.prompts.values())} prompts, {found.tokens} tokens",
        style="dim",
        highlight=False,
    )
    for line in _sentences(found):
        console.print(line, highlight=False)


def _table(title: str, first: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE, padding=(0, 1))
    table.add_column(first, min_width=10)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _agreement(found: PairMeasurement) -> Table:
    table = _table(
        "Agreement: next tokens that are the target's, of all", "workload", *(d.name for d in found.drafters)
    )
    for kind in (*found.prompts, ALL):
        cells = (d.agreement[kind] for d in found.drafters)
        table.add_row(kind, *(f"{ratio(a.agreed, a.tokens) or 0.0:.3f}" for a in cells))
    return table


def _rounds(found: PairMeasurement) -> Table:
    """Returns a table of how many rounds reach each position, at each drafter's longest speculation length."""
    longest = max(found.drafters[0].rounds)
    positions = [str(i) for i in range(1, longest + 1)]
    table = _table(f"Rounds of {longest}: share of rounds in which draft token i was accepted", "drafter", *positions)
    for drafter in found.drafters:
        shares = drafter.rounds[longest][ALL].by_position
        table.add_row(drafter.name, *(f"{share:.2f}" for share in shares))
    return table


def _lengths(found: PairMeasurement) -> Table:
    """Returns a table of tokens per round and predicted speedup by speculation length, with the step costs."""
    lengths, costs = sorted(found.drafters[0].rounds), found.costs
    table = _table("By speculation length: tokens per round, predicted speedup", "", *map(str, lengths))
    table.add_row("verify, ms", *(f"{1000 * costs.verify[k]:.1f}" for k in lengths))
    if costs.propose:
        table.add_row("draft, ms", *(f"{1000 * costs.propose[k]:.1f}" for k in lengths))
    for drafter in found.drafters:
        table.add_section()
        rounds = {k: drafter.rounds[k][ALL] for k in lengths}
        table.add_row(drafter.name, *(f"{r.tokens_per_round:.2f}" for r in rounds.values()))
        table.add_row("", *(f"{r.speedup(costs, k):.2f}x" for k, r in rounds.items()))
    return table


def _sentences(found: PairMeasurement) -> list[str]:
    plain = found.costs.verify[0]
    longest = max(found.costs.verify)
    lines = [
        f"A target step takes {1000 * plain:.1f} ms, {1000 * found.costs.verify[longest]:.1f} ms with {longest} draft"
        " tokens."
    ]
    if found.costs.draft_step is not None and found.costs.ratio is not None:
        lines.append(f"A draft step takes {1000 * found.costs.draft_step:.2f} ms: cost ratio {found.costs.ratio:.3f}.")
    lines += [_verdict(found, drafter) for drafter in found.drafters]
    return lines


def _verdict(found: PairMeasurement, drafter: DrafterFigures) -> str:
    k, speedup = drafter.best(found.costs)
    if not k:
        return f"{drafter.name}: does not pay at any speculation length; plain decoding is as fast."
    return f"{drafter.name}: best speculation length {k}, predicted {speedup:.2f}x over plain decoding."
