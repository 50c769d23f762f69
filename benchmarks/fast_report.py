"""Reports a run of benchmarks/fast.py as tables and JSON."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import date
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.against_plain import plain_ratio_bars
from benchmarks.bandwidth import Limit, Reading
from benchmarks.bars import Bar, fused_bars, many_bars, plain_bars, prompt_bars
from benchmarks.crowds import Load
from benchmarks.fast_settings import PROMPT_TOKENS
from benchmarks.figures import Sample, decoding, identity
from benchmarks.formats import BASE, FORMATS, LLAMA, format_of, is_ours
from benchmarks.peers import PeerInfo
from benchmarks.prompt_speed import PromptSpeed
from tandem.comparison.measuring.machine import this_machine
from tandem.speculation.types import ModelInfo


@dataclass
class Outcome:
    """The results of a run."""

    threads: int
    max_new_tokens: int
    builds: tuple[str, ...] = (LLAMA,)  # of llama.cpp
    started_at: str = field(default_factory=lambda: date.today().isoformat())
    readings: list[Reading] = field(default_factory=list)
    limit: Limit | None = None  # of bfloat16
    limits: dict[str, Limit] = field(default_factory=dict)  # of our other formats, by weights
    servers: dict[str, ModelInfo] = field(default_factory=dict)
    peers: dict[str, PeerInfo] = field(default_factory=dict)
    contexts: dict[str, float] = field(default_factory=dict)  # mean tokens attended to, by prompt
    samples: list[Sample] = field(default_factory=list)
    speeds: list[PromptSpeed] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    against_plain: list[Bar] = field(default_factory=lambda: plain_ratio_bars({}))
    busy: dict[str, float] = field(default_factory=dict)  # load of the idle machine, by part
    remarks: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def bars(self) -> list[Bar]:
        return [
            *plain_bars(self.samples, {form.weights: self.share_of_limit(form.plain) for form in FORMATS}, self.builds),
            *fused_bars(self.samples, self.builds),
            *prompt_bars(self.speeds, PROMPT_TOKENS, self.builds),
            *many_bars(self.loads),
            *self.against_plain,
        ]

    def share_of_limit(self, contender: str, kind: str | None = None) -> float | None:
        """Returns the limit's time over the contender's, per token after the first; drafts can bring it above 1."""
        weights = format_of(contender).weights
        limit = self.limit if weights == BASE else self.limits.get(weights)
        if limit is None or (weights != BASE and not is_ours(contender)):  # a peer's KV cache has another format
            return None
        shares = [
            1000 * limit.seconds(self.contexts[s.prompt]) / ms
            for s in self.samples
            if s.contender == contender and kind in (None, s.kind) and (ms := decoding(s))
        ]
        return statistics.median(shares) if shares else None


def document(settings: Mapping[str, Any], outcome: Outcome) -> dict[str, Any]:
    return {
        "schema_version": 2,
        "machine": asdict(this_machine()),
        "settings": dict(settings),
        "bars": [asdict(bar) | {"verdict": bar.verdict} for bar in outcome.bars],
        **asdict(outcome),
    }


def report(outcome: Outcome, console: Console) -> None:
    """Prints all results, the bars last."""
    console.print(f"machine: {this_machine()}; {outcome.threads} threads everywhere", highlight=False)
    for name, info in outcome.servers.items():
        console.print(f"{name}: {info.model_name}, {info.dtype}, plain at width {info.plain_width}", highlight=False)
    for name, peer in outcome.peers.items():
        console.print(f"{name}: {peer}", highlight=False)
    for table in tables(outcome):
        console.print(table)
    for part, share in outcome.busy.items():
        if share > 0.05:
            console.print(f"[bold red]before {part}, {share:.0%} of the idle machine was busy: do not trust it[/]")
    for remark in outcome.remarks:
        console.print(remark, highlight=False, markup=False)


def tables(outcome: Outcome) -> list[Table]:
    """Returns a table per measured part, and that of the bars."""
    parts = (
        (outcome.readings, _bandwidth_table),
        (outcome.samples, _kind_table),
        (outcome.samples, _identity_table),
        (outcome.speeds, _prompt_table),
        (outcome.loads, _load_table),
    )
    return [*(make(outcome) for measured, make in parts if measured), bar_table(outcome.bars)]


def bar_table(bars: list[Bar]) -> Table:
    table = _table("The bars, on time per token after the first", "bar", "value", "to be", "verdict", "end to end")
    colors = {"met": "green", "missed": "bold red", "not measured": "dim"}
    for bar in bars:
        verdict = f"[{colors[bar.verdict]}]{bar.verdict}[/]"
        bound = f"{'<=' if bar.at_most else '>='} {bar.bound:.2f}"
        table.add_row(bar.title, _number(bar.value), bound, verdict, _number(bar.also, dash=""))
    return table


def _bandwidth_table(outcome: Outcome) -> Table:
    limit, title = outcome.limit, "Memory read bandwidth, GB/s: best pass (median)"
    if limit:
        title += (
            f"; limit per token at batch 1: ({limit.weight_bytes / 1e6:.0f} MB of weights +"
            f" {limit.kv_bytes_per_token / 1e3:.0f} kB of KV per token before it) / {limit.bandwidth / 1e9:.1f} GB/s"
            f" = {1000 * limit.seconds(100):.2f} ms at 100"
        )
    table = _table(title, "read", "threads", "MB", "best (median)")
    for r in outcome.readings:
        table.add_row(r.kernel, str(r.threads), str(r.megabytes), f"{r.best / 1e9:.1f} ({r.median / 1e9:.1f})")
    return table


def _kind_table(outcome: Outcome) -> Table:
    kinds = list(dict.fromkeys(sample.kind for sample in outcome.samples))
    title = "One request at a time: median ms per token after the first (tokens/s; share of the limit)"
    table = _table(title, "contender", *kinds, "first token, ms")
    for name in dict.fromkeys(sample.contender for sample in outcome.samples):
        mine, cells = [s for s in outcome.samples if s.contender == name], list[str]()
        for kind in kinds:
            times = [ms for s in mine if s.kind == kind and (ms := decoding(s)) is not None]
            ms = statistics.median(times) if times else None
            share = outcome.share_of_limit(name, kind)
            cells.append("-" if not ms else f"{ms:.1f} ({1000 / ms:.0f}; {_number(share)})")
        table.add_row(name, *cells, f"{1000 * statistics.median(s.first_seconds for s in mine):.0f}")
    return table


def _identity_table(outcome: Outcome) -> Table:
    """Builds the share of tokens equal to our plain decoding's in the same format."""
    title = "Tokens of our plain decoding in the same format, up to its first end of sequence"
    table = _table(title, "contender", "requests with the same tokens", "tokens before the first that differs")
    ends = {token for model in outcome.servers.values() for token in model.end_of_sequence_ids}
    for name in dict.fromkeys(sample.contender for sample in outcome.samples):
        reference = format_of(name).plain
        found = identity(outcome.samples, name, reference, ends)
        if found and name != reference:
            table.add_row(name, f"{found.same}/{found.requests}", f"{found.share:.1%}")
    return table


def _prompt_table(outcome: Outcome) -> Table:
    table = _table("Prompts: tokens/s until the first token, median", "contender", "tokens", "tokens/s")
    for speed in outcome.speeds:
        table.add_row(speed.contender, str(speed.tokens), f"{speed.rate:.0f}")
    return table


def _load_table(outcome: Outcome) -> Table:
    levels = sorted({load.concurrency for load in outcome.loads})
    title = "Requests at once: tokens/s, end to end (times that of the fewest)"
    table = _table(title, "contender", *(str(level) for level in levels), "tokens as alone")
    for name in dict.fromkeys(load.contender for load in outcome.loads):
        mine = {load.concurrency: load for load in outcome.loads if load.contender == name}
        least = mine[levels[0]].rate
        cells = [f"{mine[level].rate:.0f} ({mine[level].rate / least:.2f})" for level in levels]
        same, total = sum(load.as_alone for load in mine.values()), sum(load.requests for load in mine.values())
        table.add_row(name, *cells, f"{same}/{total}")
    return table


def _table(title: str, first: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _number(value: float | None, dash: str = "-") -> str:
    return dash if value is None else f"{value:.2f}"
