"""Prints the results of a pair as tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console

from tandem.comparison.measuring.distributions import ratio
from tandem.comparison.report.sentences import doubts
from tandem.comparison.report.tables import Table, table
from tandem.comparison.report.terminal import rich_table
from tandem.workshops.training.acceptance.measure import ALL, DrafterFigures, PairMeasurement


def print_measured(found: PairMeasurement, console: Console) -> None:
    how = (
        "greedy" if found.sampling.greedy else f"temperature {found.sampling.temperature:g}, seed {found.sampling.seed}"
    )
    for make in (_agreement, _rounds, _lengths):
        console.print(rich_table(make(found)))
    console.print(
        f"target {found.target}, draft {found.draft or 'none'}; {found.dtype} on {found.device}; {how};"
        f" {sum(found.prompts.values())} prompts, {found.tokens} tokens",
        style="dim",
        highlight=False,
    )
    for line in _sentences(found):
        console.print(line, highlight=False)


def _table(title: str, first: str, columns: Iterable[object], rows: Sequence[Sequence[str]]) -> Table:
    return table(title, [first, *map(str, columns)], rows)


def _agreement(found: PairMeasurement) -> Table:
    rows = [
        [kind, *(f"{ratio(a.agreed, a.tokens) or 0.0:.3f}" for a in (d.agreement[kind] for d in found.drafters))]
        for kind in (*found.prompts, ALL)
    ]
    names = [d.name for d in found.drafters]
    return _table("Agreement: share of next tokens that are the target's", "workload", names, rows)


def _rounds(found: PairMeasurement) -> Table:
    """Returns a table of how many rounds reach each position, at each drafter's longest speculation length."""
    longest = max(found.drafters[0].rounds)
    rows = [[d.name, *(f"{share:.2f}" for share in d.rounds[longest][ALL].by_position)] for d in found.drafters]
    title = f"Rounds of {longest}: share of rounds in which draft token i was accepted"
    return _table(title, "drafter", range(1, longest + 1), rows)


def _lengths(found: PairMeasurement) -> Table:
    """Returns a table of tokens per round and predicted speedup by speculation length, with the step costs."""
    lengths, costs = sorted(found.drafters[0].rounds), found.costs
    rows = [["verify, ms", *(f"{1000 * costs.verify[k]:.1f}" for k in lengths)]]
    if costs.propose:
        rows.append(["draft, ms", *(f"{1000 * costs.propose[k]:.1f}" for k in lengths)])
    for drafter in found.drafters:
        rounds = {k: drafter.rounds[k][ALL] for k in lengths}
        rows.append([drafter.name, *(f"{r.tokens_per_round:.2f}" for r in rounds.values())])
        rows.append(["", *(f"{r.speedup(costs, k):.2f}x" for k, r in rounds.items())])
    return _table("By speculation length: tokens per round, predicted speedup", "", lengths, rows)


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
    best = max(found.drafters, key=lambda drafter: drafter.best(found.costs)[1])
    return [*lines, *doubts(found.doubt_of(best))]


def _verdict(found: PairMeasurement, drafter: DrafterFigures) -> str:
    k, speedup = drafter.best(found.costs)
    sureness = found.doubt_of(drafter).sureness.value
    if not k:
        return f"{drafter.name}: does not pay at any speculation length; plain decoding is as fast ({sureness})."
    return f"{drafter.name}: best speculation length {k}, predicted {speedup:.2f}x over plain decoding ({sureness})."
