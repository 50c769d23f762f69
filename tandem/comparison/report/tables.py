"""A comparison's tables, for page and terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tandem.comparison.analysis import words
from tandem.comparison.analysis.capacity import gain_of, law_of
from tandem.comparison.analysis.comparison import Comparison, Measured
from tandem.comparison.analysis.summary import Speedup, Summary
from tandem.comparison.analysis.words import milliseconds, name, number
from tandem.comparison.measuring.architectures import AUTOREGRESSIVE, FUSED
from tandem.comparison.measuring.identity import TokenIdentity, first_difference
from tandem.comparison.measuring.records import CAUSES

DIFFERS = "▸"


@dataclass(frozen=True, slots=True)
class Table:
    caption: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    texts: int = 1  # leading columns of words; the others are figures


def table(caption: str, heads: Sequence[str], rows: Iterable[Sequence[str]], note: str = "", texts: int = 1) -> Table:
    return Table(caption, tuple(heads), tuple(map(tuple, rows)), note, texts)


def architecture_table(found: Comparison, measured: Measured) -> Table:
    heads = ["architecture", "TTFT p50 ms", "TPOT p50 ms", "tokens /s", "accept rate", "mean accept",
             "bytes/tok up/down", "speedup (95 % interval)", "same tokens"]  # fmt: skip
    rows = [
        [
            name(s.architecture) + (f" ({s.failed} of {s.requests} failed)" if s.failed else ""),
            milliseconds(s.distributions["ttft_s"].p50),
            milliseconds(s.distributions["tpot_s"].p50, 2),
            number(s.output_throughput_token_per_s, 1),
            number(s.acceptance.rate, 3),
            number(s.acceptance.mean_length),
            bytes_per_token(s),
            "base" if s.architecture == found.baseline else speed(s.speedup),
            "ref" if s.architecture == AUTOREGRESSIVE.name else identical(s.identical),
        ]
        for s in measured.summaries
    ]
    rule = f", {measured.rule.value}" if measured.sampling.temperature else ""
    where = f"emulated {measured.link}" if measured.link.rtt_ms is not None else "not emulated"
    note = (
        "TTFT: time to the first token; TPOT: time per token after it; both at the client. Accept rate: accepted /"
        " drafted tokens; mean accept: tokens committed in a round. Bytes: between draft and target where they are"
        " apart, else between client and server. Same tokens: outputs with plain decoding's."
    )
    return table(f"Architectures, {where}, {words.sampling(measured.sampling)}{rule}", heads, rows, note)


def bytes_per_token(of: Summary) -> str:
    return f"{number(of.bytes_up_per_token, 1)}/{number(of.bytes_down_per_token, 1)}"


def speed(of: Speedup) -> str:
    return words.with_interval(words.times(of.ratio), of.interval)


def identical(of: TokenIdentity | None) -> str:
    return f"{of.count}/{of.total}" if of and of.total else words.MISSING


def link_table(found: Comparison) -> Table | None:
    """Mean TPOT by architecture and link; None for a single link."""
    if len(found.links) < 2:
        return None

    def tpot(of: Summary | None) -> str:
        return words.with_interval(milliseconds(of.tpot_s, 2), of.tpot_interval, 1000, 1) if of else words.MISSING

    rows = [[name(each), *(tpot(m.of(each)) for m in found.links)] for each in found.architectures]
    heads = ["architecture", *(words.link(m.link) for m in found.links)]
    return table("Mean TPOT in ms (95 % interval) on each link", heads, rows)


def emulation_table(found: Comparison) -> Table | None:
    """Measured round trips of emulated links; None without any."""
    rows = [
        [
            words.link(m.link),
            milliseconds(m.overhead.direct_p50_s, 2),
            milliseconds(m.overhead.link_p50_s, 2),
            milliseconds(m.overhead.added_s if m.link.predictable else None, 2),
        ]
        for m in found.links
        if m.overhead
    ]
    heads = ["link", "without it, ms", "over it, ms", "added by the emulation, ms"]
    caption = "Emulated links: median round trips of a small message, measured in this run"
    return table(caption, heads, rows) if rows else None


def cause_table(found: Comparison) -> Table:
    rows = [
        [name(s.architecture), *(number(s.milliseconds_per_token[cause]) for cause in CAUSES)]
        for s in found.base.summaries
    ]
    return table("Milliseconds per token by cause, end to end", ["architecture", *CAUSES], rows)


def workload_table(found: Comparison) -> Table | None:
    """The base's acceptance and speedup by workload; None without a baseline."""
    shown = [s for s in found.base.summaries if s.architecture not in (found.baseline, AUTOREGRESSIVE.name)]
    rows = [
        [name(kind), name(s.architecture), speed(of.speedup), number(of.acceptance.rate, 3)]
        for kind in dict.fromkeys(kind for s in shown for kind in s.workloads)
        for s in shown
        if (of := s.workloads.get(kind))
    ]
    heads = ["workload", "architecture", "speedup (95 % interval)", "accept rate"]
    return table("By workload", heads, rows, texts=2) if rows else None


def sampling_table(found: Comparison) -> Table | None:
    """Every temperature and rule by drafting architecture; None for a single one."""
    rows = [
        [
            words.sampling(m.sampling),
            m.rule.value,
            name(s.architecture),
            words.with_interval(number(s.acceptance.rate, 3), s.acceptance_interval),
            speed(s.speedup),
            identical(s.identical),
            milliseconds(s.distributions["tpot_s"].p50, 2),
            number(s.acceptance.mean_length),
            bytes_per_token(s),
        ]
        for m in found.samplings
        for s in m.summaries
        if s.acceptance.drafted
    ]
    heads = ["sampling", "rule", "architecture", "accept rate (95 % interval)", "speedup (95 % interval)",
             "same tokens", "TPOT p50 ms", "mean accept", "bytes/tok up/down"]  # fmt: skip
    note = (
        "Agreement commits the target's own draws, so the tokens are plain decoding's; rejection keeps their"
        " distribution, and no identity is claimed."
    )
    return table("Temperature and verification rule", heads, rows, note, 3) if rows else None


def load_table(found: Comparison) -> Table | None:
    """LLMPerf's figures by load and architecture; None without a load."""
    rows = [
        [
            str(m.load),
            name(of.architecture),
            number(of.mean_output_throughput_token_per_s, 1),
            milliseconds(of.distributions["tpot_s"].p50, 2),
            milliseconds(of.distributions["ttft_s"].p50),
            identical(of.identical),
            str(of.failed),
            number(of.num_completed_requests_per_minute, 1),
            milliseconds(of.distributions["tpot_s"].p99, 2),
            milliseconds(of.distributions["ttft_s"].p99),
            milliseconds(of.distributions["end_to_end_latency_s"].p50, 0),
        ]
        for m in found.loads
        for of in m.summaries
    ]
    heads = ["load", "architecture", "tokens /s", "TPOT p50 ms", "TTFT p50 ms", "same tokens", "errors",
             "requests /min", "TPOT p99 ms", "TTFT p99 ms", "E2E p50 ms"]  # fmt: skip
    note = (
        "tokens/s and requests/min: of completed requests, over the time from the first request sent to the last one"
        " ended. Same tokens: as plain decoding with the fewest requests beside it."
    )
    return table("Under load", heads, rows, note, 2) if rows else None


def capacity_table(found: Comparison) -> Table | None:
    """Clients within the bound, and 95th percentiles by number of clients; None without a capacity."""
    if not found.capacity:
        return None
    counts = sorted({count for one in found.capacity for count in one.p95_s})
    rows = []
    for one in found.capacity:
        clients = f"{'≥ ' if one.at_least else ''}{one.clients:.1f}".removesuffix(".0")
        row = [name(one.architecture), clients, number(one.tokens_per_second, 1)]
        rows.append([*row, *(milliseconds(one.p95_s.get(count)) for count in counts)])
    note = "Clients are interpolated between measured numbers; each has a draft of its own where drafts are apart."
    if (gain := gain_of(found.capacity)) is not None:
        law = law_of(fused) if (fused := found.base.of(FUSED.name)) else None
        note += f" Drafts of the clients' own serve {words.times(gain)} the clients of drafts beside the target"
        note += "." if law is None else f"; 1 + g t_d / t_v (arXiv 2606.25091) says {words.times(law)}."
    heads = ["architecture", "clients", "tokens/s", *(f"with {count}" for count in counts)]
    caption = f"Clients of one target at {found.config.capacity:.0f} ms a token, and p95 of the time per token in ms"
    return table(caption, heads, rows, note)


def divergence_table(found: Comparison) -> Table | None:
    """Outputs that differ from plain decoding's; None without any."""
    rows = [
        [
            name(s.architecture),
            m.name,
            f"{d.prompt}, run {d.run}",
            str(d.position),
            *("ended" if token is None else str(token) for token in (d.token, d.autoregressive_token)),
            number(d.logit_gap, 4),
        ]
        for m in found.conditions
        for s in m.summaries
        for d in (s.identical.divergences if s.identical else ())
    ]
    heads = ["architecture", "condition", "request", "position", "token", "plain token", "logit gap"]
    return table("Outputs that differ from plain decoding", heads, rows, texts=3) if rows else None


def answer_table(found: Comparison) -> Table | None:
    """The different answers of the base's first run, plain decoding's first and prompts with several first."""
    answers: dict[str, dict[str, list[str]]] = {}  # names by text, by prompt
    for record in sorted(found.records, key=lambda record: record.architecture != AUTOREGRESSIVE.name):
        if record.condition == found.base.name and not record.run and (of := record.measurement):
            answers.setdefault(record.prompt, {}).setdefault(of.text, []).append(name(record.architecture))
    rows = []
    for prompt, texts in sorted(answers.items(), key=lambda answer: len(answer[1]) == 1):
        first = next(iter(texts))
        for text, names in texts.items():
            start = first_difference(first, text)
            marked = text if start is None else f"{text[:start]}{DIFFERS}{text[start:]}"
            rows.append([prompt, words.joined(names), marked])
    note = f"{DIFFERS}: the first difference from the first answer to the prompt."
    return table("Answers", ["prompt", "architectures", "answer"], rows, note, 3) if rows else None


def failure_table(found: Comparison) -> Table | None:
    failed = [(each, "warm-up", "", failure) for each, failure in found.warm_up_failures.items()]
    failed += [
        (r.architecture, r.condition, f"{r.prompt}, run {r.run}", r.error) for r in found.failed if r.error is not None
    ]
    rows = [[name(each), condition, request, error.code, error.message] for each, condition, request, error in failed]
    heads = ["architecture", "condition", "request", "code", "message"]
    return table("Failed requests", heads, rows, texts=5) if rows else None
