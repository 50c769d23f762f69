"""Prints a pair's results as tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group
from rich.table import Table

from tandem_train.accept import ALL, DrafterFigures, PairMeasurement


def print_measured(found: PairMeasurement, console: Console) -> None:
    sampling = found.sampling
    how = "greedy" if sampling.greedy else f"temperature {sampling.temperature:g}, seed {sampling.seed}"
    for make in (_agreement, _rounds, _lengths):
        console.print(make(found))
    console.print(
        f"target {found.target}, draft {found.draft or 'none'}; {found.dtype} on {found.device}; {how};"
        f" {sum(found.prompts.values())} prompts, {found.tokens} tokens",
        style="dim",
        highlight=False,
    )
    costs = found.costs
    longest = max(costs.verify)
    line = f"A target step takes {1000 * costs.verify[0]:.1f} ms, {1000 * costs.verify[longest]:.1f} ms with {longest}"
    console.print(f"{line} draft tokens.", highlight=False)
    if costs.draft_step is not None and costs.ratio is not None:
        line = f"A draft step takes {1000 * costs.draft_step:.2f} ms: cost ratio {costs.ratio:.3f}."
        console.print(line, highlight=False)
    for drafter in found.drafters:
        console.print(_verdict(found, drafter), highlight=False)


def _table(title: str, columns: Sequence[object], rows: Sequence[Sequence[str]]) -> Group:
    made = Table()
    for number, column in enumerate(columns):
        made.add_column(str(column), justify="right" if number else "left")
    for row in rows:
        made.add_row(*row)
    return Group(title, made)


def _agreement(found: PairMeasurement) -> Group:
    rows = [
        [kind, *(f"{d.agreement[kind].agreed / max(1, d.agreement[kind].tokens):.3f}" for d in found.drafters)]
        for kind in (*found.prompts, ALL)
    ]
    columns = ["workload", *(drafter.name for drafter in found.drafters)]
    return _table("Agreement: share of next tokens that are the target's", columns, rows)


def _rounds(found: PairMeasurement) -> Group:
    """Rounds that reach each position, at the longest speculation length."""
    longest = max(found.drafters[0].rounds)
    rows = []
    for drafter in found.drafters:
        made = drafter.rounds[longest]
        rows.append([drafter.name, *(f"{count / max(1, made.rounds):.2f}" for count in made.by_position)])
    title = f"Rounds of {longest}: share of rounds in which draft token i was accepted"
    return _table(title, ["drafter", *range(1, longest + 1)], rows)


def _lengths(found: PairMeasurement) -> Group:
    """Tokens per round and predicted speedup by speculation length, with step costs."""
    lengths, costs = sorted(found.drafters[0].rounds), found.costs
    rows = [["verify, ms", *(f"{1000 * costs.verify[k]:.1f}" for k in lengths)]]
    if costs.propose:
        rows.append(["draft, ms", *(f"{1000 * costs.propose[k]:.1f}" for k in lengths)])
    for drafter in found.drafters:
        rows.append([drafter.name, *(f"{drafter.rounds[k].tokens_per_round:.2f}" for k in lengths)])
        rows.append(["", *(f"{drafter.rounds[k].speedup(costs, k):.2f}x" for k in lengths)])
    return _table("By speculation length: tokens per round, predicted speedup", ["", *lengths], rows)


def _verdict(found: PairMeasurement, drafter: DrafterFigures) -> str:
    k, speedup = drafter.best(found.costs)
    if not k:
        return f"{drafter.name}: does not pay at any speculation length; plain decoding is as fast."
    return f"{drafter.name}: best speculation length {k}, predicted {speedup:.2f}x over plain decoding."
