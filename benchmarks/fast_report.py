"""Reports a run of benchmarks/fast.py as tables and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.against_plain import plain_ratio_bars
from benchmarks.bandwidth import Limit, Reading
from benchmarks.bars import AUTOREGRESSIVE, FUSED, Bar, gap_bars, load_bars, round_bars, single_bars
from benchmarks.fast_settings import PROMPT_TOKENS
from benchmarks.figures import Sample
from benchmarks.format_bars import fused_bar, many_bars, plain_bars, prompt_bars
from benchmarks.format_report import identity_table, prompt_table
from benchmarks.formats import BASE, FORMATS, PEERS, format_of
from benchmarks.gaps import Stall
from benchmarks.load import Load
from benchmarks.peers import PeerInfo
from benchmarks.prompt_speed import PromptSpeed
from benchmarks.rounds import RoundCheck, check_rounds, median_ratio
from benchmarks.tables import contender_table
from tandem.comparison.measuring.environment import these_versions, this_machine
from tandem.speculation.types import ModelInfo


@dataclass
class Outcome:
    """The results of a run. `contexts`: prompt -> mean tokens attended to; `busy`: part -> load of the idle machine;
    `limit`: of bfloat16, `limits`: weights -> that of other formats of ours."""

    threads: int
    max_new_tokens: int
    readings: list[Reading] = field(default_factory=list)
    limit: Limit | None = None
    limits: dict[str, Limit] = field(default_factory=dict)
    servers: dict[str, ModelInfo] = field(default_factory=dict)
    peers: dict[str, PeerInfo] = field(default_factory=dict)
    contexts: dict[str, float] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    speeds: list[PromptSpeed] = field(default_factory=list)
    crowd_context: float = 0.0
    loads: list[Load] = field(default_factory=list)
    stall: Stall | None = None
    against_plain: list[Bar] = field(default_factory=lambda: plain_ratio_bars({}))
    busy: dict[str, float] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def rounds(self) -> list[RoundCheck]:
        return check_rounds(self.samples, FUSED)

    @property
    def bars(self) -> list[Bar]:
        return [
            *single_bars(self.samples, self.share_of_limit(AUTOREGRESSIVE)),
            *plain_bars(self.samples, {form.weights: self.share_of_limit(form.plain) for form in FORMATS}),
            fused_bar(self.samples),
            *round_bars(median_ratio(self.rounds)),
            *prompt_bars(self.speeds, PROMPT_TOKENS),
            *load_bars(self.loads),
            *many_bars(self.loads),
            *gap_bars(self.stall.chunks if self.stall else None),
            *self.against_plain,
        ]

    def share_of_limit(self, contender: str, kind: str | None = None) -> float | None:
        """Returns the limit's time over the contender's, per token after the first; drafts can bring it above 1."""
        limit = self._limit_of(contender)
        if limit is None:
            return None
        shares = [
            1000 * limit.seconds(self.contexts[s.prompt]) / ms
            for s in self.samples
            if s.contender == contender and kind in (None, s.kind) and (ms := s.ms_per_later_token) is not None
        ]
        return statistics.median(shares) if shares else None

    def _limit_of(self, contender: str) -> Limit | None:
        weights = format_of(contender).weights
        if weights == BASE:
            return self.limit
        return None if contender.startswith(PEERS) else self.limits.get(weights)  # its KV cache has another format

    @property
    def ends(self) -> set[int]:
        """Returns the end-of-sequence token ids of the served models."""
        return {token for model in self.servers.values() for token in model.end_of_sequence_ids}


def document(settings: Mapping[str, Any], outcome: Outcome) -> dict[str, Any]:
    """Returns the document that --output writes."""
    kinds = dict.fromkeys(sample.kind for sample in outcome.samples)
    names = dict.fromkeys(sample.contender for sample in outcome.samples)
    return {
        "schema_version": 1,
        "machine": asdict(this_machine()),
        "versions": asdict(these_versions()),
        "settings": dict(settings),
        "bars": [asdict(bar) | {"verdict": bar.verdict} for bar in outcome.bars],
        "shares_of_limit": {name: {k: outcome.share_of_limit(name, k) for k in (None, *kinds)} for name in names},
        "rounds": [asdict(check) | {"ratio": check.ratio} for check in outcome.rounds],
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
    """Returns the bars of the parts that were measured."""
    found: list[Table] = []
    if outcome.readings:
        found.append(_bandwidth_table(outcome))
    if outcome.samples:
        found += [_kind_table(outcome), contender_table(outcome.samples, outcome.samples[0].contender)]
        found.append(identity_table(outcome.samples, outcome.ends))
    if outcome.rounds:
        found.append(_round_table(outcome))
    if outcome.speeds:
        found.append(prompt_table(outcome.speeds))
    if outcome.loads:
        found.append(_load_table(outcome))
    if outcome.stall:
        found.append(_stall_table(outcome.stall))
    return [*found, bar_table(outcome.bars)]


def bar_table(bars: list[Bar]) -> Table:
    """Formats the value, the bound and the verdict."""
    table = _table("The bars, on time per token after the first", "bar", "value", "to be", "verdict", "end to end")
    colors = {"met": "green", "missed": "bold red", "not measured": "dim"}
    for bar in bars:
        verdict = f"[{colors[bar.verdict]}]{bar.verdict}[/]"
        bound = f"{'<=' if bar.at_most else '>='} {bar.bound:.2f}"
        table.add_row(bar.title, _number(bar.value), bound, verdict, _number(bar.also, dash=""))
    return table


def _bandwidth_table(outcome: Outcome) -> Table:
    limit = outcome.limit
    title = "Memory read bandwidth, GB/s: best pass (median)"
    if limit:
        title += (
            f"; limit per token at batch 1: ({limit.weight_bytes / 1e6:.0f} MB of weights +"
            f" {limit.kv_bytes_per_token / 1e3:.0f} kB of KV per token before it) / {limit.bandwidth / 1e9:.1f} GB/s"
            f" = {1000 * limit.seconds(100):.2f} ms at 100"
        )
    sizes = list(dict.fromkeys(reading.megabytes for reading in outcome.readings))
    table = _table(title, "read", "threads", *(f"{size} MB" for size in sizes))
    for kernel, threads in dict.fromkeys((r.kernel, r.threads) for r in outcome.readings):
        row = [r for r in outcome.readings if (r.kernel, r.threads) == (kernel, threads)]
        table.add_row(kernel, str(threads), *(f"{r.best / 1e9:.1f} ({r.median / 1e9:.1f})" for r in row))
    return table


def _kind_table(outcome: Outcome) -> Table:
    kinds = list(dict.fromkeys(sample.kind for sample in outcome.samples))
    title = "One request at a time: median ms per token after the first (tokens/s; share of the limit)"
    table = _table(title, "contender", *kinds)
    for name in dict.fromkeys(sample.contender for sample in outcome.samples):
        cells: list[str] = []
        for kind in kinds:
            mine = [s for s in outcome.samples if (s.contender, s.kind) == (name, kind)]
            times = [ms for s in mine if (ms := s.ms_per_later_token) is not None]
            ms = statistics.median(times) if times else None
            share = outcome.share_of_limit(name, kind)
            cells.append("-" if ms is None else f"{ms:.1f} ({1000 / ms:.0f}; {_number(share)})")
        table.add_row(name, *cells)
    return table


def _round_table(outcome: Outcome) -> Table:
    title = "Fused rounds: (draft + verify) / mean acceptance length, beside time per token at the client"
    table = _table(title, "prompt", "draft ms", "verify ms", "length", "expected ms", "measured ms", "ratio")
    for c in outcome.rounds:
        figures = (c.draft_ms, c.verify_ms, c.acceptance_length, c.expected_ms, c.measured_ms, c.ratio)
        table.add_row(c.prompt, *(f"{figure:.2f}" for figure in figures))
    return table


def _load_table(outcome: Outcome) -> Table:
    levels = sorted({load.concurrency for load in outcome.loads})
    title = "Requests at once: tokens/s, end to end (times that of the fewest"
    title += "; times the limit of batch 1)" if outcome.limit else ")"
    table = _table(title, "contender", *(str(level) for level in levels), "tokens as alone")
    for name in dict.fromkeys(load.contender for load in outcome.loads):
        mine = {load.concurrency: load for load in outcome.loads if load.contender == name}
        cells = [_load_cell(outcome, mine[level], mine[levels[0]]) for level in levels]
        same, total = (sum(of(load) for load in mine.values()) for of in _SAME)
        table.add_row(name, *cells, f"{same}/{total}")
    return table


_SAME: tuple[Callable[[Load], int], ...] = (lambda load: load.as_alone, lambda load: load.requests)


def _load_cell(outcome: Outcome, load: Load, least: Load) -> str:
    limit = f"; {load.rate * outcome.limit.seconds(outcome.crowd_context):.2f}" if outcome.limit else ""
    return f"{load.rate:.0f} ({load.rate / least.rate:.2f}{limit})"


def _stall_table(stall: Stall) -> Table:
    title = (
        f"Gaps between chunks of a running fused request, ms; newcomers of {stall.newcomer_tokens} tokens;"
        f" one prefill chunk of {stall.chunk_tokens}, target and draft: {stall.chunk:.1f} ms;"
        f" tokens {'unchanged' if stall.same_tokens else 'CHANGED'}"
    )
    table = _table(title, "", "newcomers", "gaps", "p50", "p99", "largest")
    for name, came, g in (("alone", 0, stall.without), ("while newcomers prefill", stall.newcomers, stall.beside)):
        table.add_row(name, str(came), str(g.count), *(f"{ms:.1f}" for ms in (g.p50, g.p99, g.largest)))
    return table


def _table(title: str, first: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _number(value: float | None, dash: str = "-") -> str:
    return dash if value is None else f"{value:.2f}"
