"""Lists the plots of a report and describes their findings in words, without matplotlib."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tandem.comparison.analysis.doubt import MISSED
from tandem.comparison.measuring.architectures import DISTRIBUTED, PLAIN
from tandem.comparison.measuring.attempt import format_error
from tandem.comparison.report import formatting as fmt
from tandem.comparison.report import plots_acceptance, plots_bars, plots_link, plots_requests, reading
from tandem.comparison.report.blocks import Plot
from tandem.comparison.report.load_tables import THROUGHPUT
from tandem.comparison.report.reading import JSON, NothingToDraw
from tandem.comparison.report.theory_tables import break_even

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing


@dataclass(frozen=True, slots=True)
class Figure:
    """A plot of the report. `finding` describes what it shows, or raises NothingToDraw with the reason."""

    name: str
    title: str
    finding: Callable[[JSON], str]
    draw: Callable[[JSON], Drawing]

    def block(self, comparison: JSON) -> Plot:
        try:
            return Plot(self.name, self.title, self.finding(comparison))
        except NothingToDraw as why:
            return left_out(self.name, self.title, f"{why}")
        except Exception as error:
            return left_out(self.name, self.title, f"it could not be made: {format_error(error)}", failed=True)


def left_out(name: str, title: str, why: str, failed: bool = False) -> Plot:
    """Returns a plot without a picture; `why` is a sentence."""
    return Plot(name, title, f"Left out: {why[:1].lower()}{why[1:]}", drawn=False, failed=failed)


def _extremes(values: dict[str, float]) -> tuple[str, str]:
    """Returns the names of the most and the least."""
    return max(values, key=values.__getitem__), min(values, key=values.__getitem__)


def _tpot_by_rtt(comparison: JSON) -> str:
    conditions, theory = reading.links(comparison), comparison["theory"]
    if theory is None and len({c["link"]["rtt_ms"] for c in conditions}) < 2:
        raise NothingToDraw(plots_link.ONE_POINT)
    if reading.same_round_trip(conditions):
        raise NothingToDraw(plots_link.SEVERAL_LINKS)
    first, last = conditions[0], conditions[-1]
    sentences = []
    for name in first["architectures"]:
        near, far = reading.mean_tpot(first, name), reading.mean_tpot(last, name)
        if near and far and first is not last and far / near > 1.1:
            sentences.append(
                f"{fmt.name(name)} goes from {fmt.ms(near)} a token {fmt.link_phrase(first['link'])}"
                f" to {fmt.ms(far)} {fmt.link_phrase(last['link'])}."
            )
    if first is not last and not sentences:
        sentences.append("No architecture's time per token moves by more than a tenth over the measured round trips.")
    if theory:
        sentences.append(break_even(theory))
        if {DISTRIBUTED.name, reading.baseline(comparison)} & set(reading.missed(comparison)):
            sentences.append("Do not rely on that: it follows from predictions that missed.")
        ran = {p["architecture"] for p in theory["predictions"] if p["measured_tpot_s"] is not None}
        drawn = {name for point in theory["curve"] for name in point["tpot_s"]}
        missed = reading.missed(comparison)
        sentences.append("Points are measured (bars: 95 % interval), solid lines predicted.")
        if missed:
            names = fmt.joined([fmt.name(name) for name in missed])
            sentences.append(
                f"Missed by more than a factor of {MISSED:g}: {names}. There the solid line joins what was"
                " measured, and crosses mark the predictions."
            )
        sentences += [f"Dashed: {fmt.name(n)}, predicted, not measured." for n in sorted(drawn - ran)]
    return fmt.capitalised(*sentences)


def _tpot_by_link(comparison: JSON) -> str:
    sentences = []
    conditions = plots_link.several_links(comparison)
    fastest = {
        c["name"]: min((tpot, name) for name in c["architectures"] if (tpot := reading.mean_tpot(c, name)))[1]
        for c in conditions
    }
    for name in dict.fromkeys(fastest.values()):
        on = sum(each == name for each in fastest.values())
        sentences.append(f"{fmt.name_in_sentence(name)} takes the least time on {on} of {len(conditions)} links.")
    return fmt.capitalised(
        *sentences,
        "A strip for each link; thin marks are requests, the others means (bars: 95 % interval), measured.",
    )


def _time_by_cause(comparison: JSON) -> str:
    parts = []
    conditions = reading.links(comparison)
    for condition in (conditions[0], conditions[-1]):
        found = {name: of["milliseconds_per_token"] for name, of in condition["architectures"].items()}
        shares = {
            name: (causes["network"] or 0.0) / total
            for name, causes in found.items()
            if (total := sum(value or 0.0 for value in causes.values()))
        }
        if not shares:
            raise NothingToDraw(plots_bars.NO_TIME)
        most, _ = _extremes(shares)
        text = f"{fmt.percent(shares[most])} of {fmt.name(most)}'s time" if shares[most] > 0 else "no time"
        parts.append(f"{text} {fmt.link_phrase(condition['link'])}")
    ahead = [of.get("sent_ahead") for of in reading.base(comparison)["architectures"].values()]
    overlap = (
        ", to more where draft and verification overlap" if any(a and a["max_in_flight"] > 1 for a in ahead) else ""
    )
    return (
        f"The network takes {fmt.joined(list(dict.fromkeys(parts)))}."
        f" The causes of a bar add up to its end-to-end time{overlap}."
    )


def _speedup_by_workload(comparison: JSON) -> str:
    names, by_workload = plots_bars.speedups(comparison)
    shown = reading.speculating(comparison)
    name = shown if shown in names else names[0]
    gains = {kind: of[name]["speedup_vs_autoregressive"] for kind, of in by_workload.items() if name in of}
    most, least = _extremes(gains)
    where = fmt.link_phrase(reading.base(comparison)["link"])
    if most == least:
        return fmt.capitalised(f"{fmt.name(name)} is {fmt.times(gains[most])} as fast as plain decoding {where}.")
    losing = [fmt.name(kind) for kind, gain in gains.items() if gain < 1]
    return fmt.capitalised(
        f"{fmt.name(name)} gains most on {fmt.name(most)} ({fmt.times(gains[most])}) and least on"
        f" {fmt.name(least)} ({fmt.times(gains[least])}), {where}.",
        *([f"It loses on {fmt.joined(losing)}."] if losing else []),
        "Thin lines are 95 % intervals.",
    )


def _acceptance_by_position(comparison: JSON) -> str:
    name, found = plots_acceptance.acceptance_by_workload(comparison)
    rates = {kind: of["acceptance_rate"] for kind, of in found.items() if of["acceptance_rate"] is not None}
    most, least = _extremes(rates)
    spread = f"{fmt.number(rates[most])} of the draft tokens"
    if most != least:
        spread = (
            f"from {fmt.number(rates[least])} of the draft tokens on {fmt.name(least)} to {fmt.number(rates[most])}"
            f" on {fmt.name(most)}"
        )
    return (
        f"The target accepts {spread} ({fmt.name(name)}). Each panel is a workload, the others behind it in grey;"
        " later positions fall because one rejection discards what follows."
    )


def _tokens_over_time(comparison: JSON) -> str:
    prompt, run, records = reading.typical_prompt(comparison)
    bursts = [max(r["chunk_tokens"]) for name, r in records.items() if name not in PLAIN]
    run_text = f", run {run}" if run else ""
    return (
        f"The prompt {prompt}{run_text}, whose speedup is nearest the median"
        f", {fmt.link_phrase(reading.base(comparison)['link'])}. Under speculation tokens come in bursts of up to"
        f" {max(bursts, default=1)}, one for each round; plain decoding sends one at a time."
    )


def _tpot_by_length(comparison: JSON) -> str:
    theory = comparison["theory"]
    if not theory or not theory["best_lengths"]:
        raise NothingToDraw("Nothing was predicted, so no length can be advised.")
    shown = reading.speculating(comparison)
    found = [b for b in theory["best_lengths"] if b["architecture"] == shown] or theory["best_lengths"]
    lengths = list(dict.fromkeys(str(b["length"]) for b in sorted(found, key=lambda b: b["rtt_ms"])))
    where = "whatever the round trip" if len(lengths) == 1 else "as the round trip grows"
    auto = theory["length"] is None
    return fmt.capitalised(
        ("of fixed speculation lengths, " if auto else "")
        + f"{fmt.name(found[0]['architecture'])} is predicted to be fastest at "
        + ("" if auto else "speculation length ")
        + fmt.joined(lengths)
        + (f", {where}" if len(found) > 1 else "")
        + ("; auto was run." if auto else f"; {theory['length']} was run (dotted line)."),
        "Rings: least predicted; filled markers: measured"
        + (", at the mean of what auto drafted." if auto else ".")
        + " Length 0 is plain decoding.",
    )


def _acceptance_by_temperature(comparison: JSON) -> str:
    name, by_rule = plots_acceptance.sampled_by_rule(comparison)
    warm = {rule: [(t, of) for t, of in each if t > 0] for rule, each in by_rule.items()}
    rates, sent = (
        {rule: statistics.fmean(y for _, y in points) for rule, points in plots_acceptance.known(warm, value).items()}
        for value in (plots_acceptance.acceptance_rate, plots_acceptance.bytes_per_token)
    )
    if not rates or not sent:
        raise NothingToDraw(f"No draft of {name} was verified above temperature 0.")
    return fmt.capitalised(
        f"Above temperature 0, the share of {fmt.name(name)}'s draft tokens that is accepted averages"
        f" {fmt.joined([f'{fmt.number(rate)} under {rule}' for rule, rate in rates.items()])}; a token costs"
        f" {fmt.joined([f'{size:.0f} under {rule}' for rule, size in sent.items()])} bytes, both ways,"
        f" {fmt.link_phrase(reading.base(comparison)['link'])}."
    )


def _latency_by_throughput(comparison: JSON) -> str:
    rows = plots_requests.drawable(comparison)
    most = max(rows, key=lambda row: float(row.of[THROUGHPUT]))
    loads = zip(("solid", "dashed"), plots_requests.loads_of(rows), strict=True)
    points = " and ".join(f"{line}, {load}" for line, load in loads if load)
    return fmt.capitalised(
        f"{fmt.name(most.architecture)} reaches the most, {fmt.number(most.of[THROUGHPUT], 0)} tokens/s with"
        f" {most.load}, at a median TTFT of {fmt.ms(most.of['ttft_s']['p50'], 0)} and TPOT of"
        f" {fmt.ms(most.of['tpot_s']['p50'])}.",
        f"Further right and lower is better. Points of a line, in order: {points}.",
    )


FIGURES = (
    Figure("tpot-by-rtt", "Time per token against round trip", _tpot_by_rtt, plots_link.tpot_by_rtt),
    Figure("time-by-cause", "Where the milliseconds go", _time_by_cause, plots_bars.time_by_cause),
    Figure("speedup-by-workload", "Speedup by workload", _speedup_by_workload, plots_bars.speedup_by_workload),
    Figure(
        "tpot-by-length", "Predicted time per token by speculation length", _tpot_by_length, plots_link.tpot_by_length
    ),
    Figure("acceptance-by-position", "Acceptance by position and workload", _acceptance_by_position,
           plots_acceptance.acceptance_by_position),
    Figure("latency-by-throughput", "Latency against throughput under load", _latency_by_throughput,
           plots_requests.latency_by_throughput),
    Figure("tpot-by-link", "Time per token on each link", _tpot_by_link, plots_link.tpot_by_link),
    Figure("tokens-over-time", "Tokens over time", _tokens_over_time, plots_requests.tokens_over_time),
    Figure("acceptance-by-temperature", "Agreement against rejection", _acceptance_by_temperature,
           plots_acceptance.acceptance_by_temperature),
)  # fmt: skip
