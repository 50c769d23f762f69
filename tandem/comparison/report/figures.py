"""Lists the plots of a report and describes their findings in words, without matplotlib."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from tandem.comparison.report import formatting as fmt
from tandem.comparison.report import plots_acceptance, plots_link, plots_load, plots_speedup, plots_time, reading
from tandem.comparison.report.attempt import format_error
from tandem.comparison.report.blocks import Plot
from tandem.comparison.report.plots_acceptance import bytes_per_token
from tandem.comparison.report.reading import JSON, NothingToDraw
from tandem.comparison.report.style import Draw


@dataclass(frozen=True, slots=True)
class Figure:
    """A plot of the report. `finding` describes what it shows, or raises NothingToDraw with the reason."""

    name: str
    title: str
    finding: Callable[[JSON], str]
    draw: Draw

    def block(self, comparison: JSON) -> Plot:
        try:
            return Plot(self.name, self.title, self.finding(comparison))
        except NothingToDraw as why:
            return left_out(self.name, self.title, f"{why}")
        except Exception as error:
            return left_out(self.name, self.title, f"it could not be made: {format_error(error)}")


def left_out(name: str, title: str, why: str) -> Plot:
    """Returns a plot without a picture; `why` is a sentence."""
    return Plot(name, title, f"Left out: {why[:1].lower()}{why[1:]}", drawn=False)


def _tpot_by_rtt(comparison: JSON) -> str:
    conditions, theory = reading.links(comparison), comparison["theory"]
    rtts = sorted({c["link"]["rtt_ms"] for c in conditions})
    if theory is None and len(rtts) < 2:
        raise NothingToDraw("Only one round trip was measured and nothing was predicted; see the tables.")
    first, last = conditions[0], conditions[-1]
    sentences = []
    for name in first["architectures"]:
        near, far = reading.mean_tpot(first, name), reading.mean_tpot(last, name)
        if near and far and first is not last and far / near > 1.1:
            sentences.append(
                f"{fmt.name(name)} goes from {fmt.milliseconds(near)} ms a token {fmt.link_phrase(first['link'])}"
                f" to {fmt.milliseconds(far)} ms {fmt.link_phrase(last['link'])}."
            )
    if first is not last and not sentences:
        sentences.append("No architecture's time per token moves by more than a tenth over the measured round trips.")
    if theory:
        sentences.append(_break_even(theory))
        ran = {p["architecture"] for p in theory["predictions"] if p["measured_tpot_s"] is not None}
        drawn = {name for point in theory["curve"] for name in point["tpot_s"]}
        sentences.append("Points are measured (bars: 95 % interval), solid lines predicted.")
        sentences += [f"Dashed: {fmt.name(n)}, predicted, not measured." for n in sorted(drawn - ran)]
    return _capitalised(sentences)


def _break_even(theory: JSON) -> str:
    even, spread, seen = (
        theory[key] for key in ("break_even_rtt_s", "break_even_interval_s", "measured_break_even_rtt_s")
    )
    if even is None:
        return "No break-even between distributed and plain decoding was predicted."
    if even <= 0:
        return "Distributed is predicted to beat plain decoding at no round trip."
    text = fmt.with_interval(f"{fmt.milliseconds(even, 0)} ms", spread, 1000, 0)
    crossed = f"; the measured times cross at {fmt.milliseconds(seen, 0)} ms" if seen is not None else ""
    return f"Distributed is predicted to break even with plain decoding at a round trip of {text}{crossed}."


def _time_by_cause(comparison: JSON) -> str:
    parts = []
    for condition in (reading.links(comparison)[0], reading.links(comparison)[-1]):
        found = {name: of["milliseconds_per_token"] for name, of in condition["architectures"].items()}
        shares = {
            name: (causes["network"] or 0.0) / total
            for name, causes in found.items()
            if (total := sum(value or 0.0 for value in causes.values()))
        }
        if not shares:
            raise NothingToDraw("No request completed that took any time.")
        most = max(shares, key=lambda name: shares[name])
        text = f"{fmt.percent(shares[most])} of {fmt.name(most)}'s time" if shares[most] > 0 else "no time"
        parts.append(f"{text} {fmt.link_phrase(condition['link'])}")
    return (
        f"The network takes {fmt.joined(list(dict.fromkeys(parts)))}."
        " The causes of a bar add up to its end-to-end time"
        f"{', to more where draft and verification overlap' if _overlaps(comparison) else ''}."
    )


def _overlaps(comparison: JSON) -> bool:
    """Tells whether several rounds were in flight at once."""
    found = (of.get("sent_ahead") for of in reading.base(comparison)["architectures"].values())
    return any(ahead and ahead["max_in_flight"] > 1 for ahead in found)


def _speedup_by_workload(comparison: JSON) -> str:
    names, by_workload = plots_speedup.speedups(comparison)
    shown = reading.speculating(comparison)
    name = shown if shown in names else names[0]
    gains = {kind: of[name]["speedup_vs_autoregressive"] for kind, of in by_workload.items() if name in of}
    most, least = max(gains, key=lambda k: gains[k]), min(gains, key=lambda k: gains[k])
    where = fmt.link_phrase(reading.base(comparison)["link"])
    if most == least:
        text = f"{fmt.name(name)} is {fmt.times(gains[most])} as fast as plain decoding {where}."
        return _capitalised([text])
    losing = [kind for kind, gain in gains.items() if gain < 1]
    loses = f" It loses on {fmt.joined([fmt.name(kind) for kind in losing])}." if losing else ""
    return _capitalised(
        [
            f"{fmt.name(name)} gains most on {fmt.name(most)} ({fmt.times(gains[most])}) and least on"
            f" {fmt.name(least)} ({fmt.times(gains[least])}), {where}.{loses}",
            "Thin lines are 95 % intervals.",
        ]
    )


def _acceptance_by_position(comparison: JSON) -> str:
    name, found = plots_acceptance.acceptance_by_workload(comparison)
    rates = {kind: of["acceptance_rate"] for kind, of in found.items() if of["acceptance_rate"] is not None}
    most, least = max(rates, key=lambda k: rates[k]), min(rates, key=lambda k: rates[k])
    spread = (
        f"from {fmt.number(rates[least])} of the draft tokens on {fmt.name(least)} to {fmt.number(rates[most])}"
        f" on {fmt.name(most)}"
        if most != least
        else f"{fmt.number(rates[most])} of the draft tokens"
    )
    return (
        f"The target accepts {spread} ({fmt.name(name)}). Each panel is a workload, the others behind it in grey;"
        " later positions fall because one rejection discards what follows."
    )


def _tokens_over_time(comparison: JSON) -> str:
    prompt, run, records = reading.typical_prompt(comparison)
    bursts = [max(r["chunk_tokens"]) for name, r in records.items() if name not in reading.PLAIN]
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
    lengths = list(dict.fromkeys(b["length"] for b in sorted(found, key=lambda b: b["rtt_ms"])))
    which = fmt.joined([str(length) for length in lengths])
    where = "whatever the round trip" if len(lengths) == 1 and len(found) > 1 else "as the round trip grows"
    return _capitalised(
        [
            f"{fmt.name(found[0]['architecture'])} is predicted to be fastest at speculation length {which}"
            + (f", {where}" if len(found) > 1 else "")
            + f"; {theory['length']} was run (dotted line).",
            "Rings: least predicted; filled markers: measured. Length 0 is plain decoding.",
        ]
    )


def _acceptance_by_temperature(comparison: JSON) -> str:
    name, by_rule = plots_acceptance.sampled_by_rule(comparison)
    sentences = []
    rates = {
        rule: [r for c in cs if (r := c["architectures"][name]["acceptance_rate"]) is not None and _warm(c)]
        for rule, cs in by_rule.items()
    }
    for rule, values in rates.items():
        if values:
            sentences.append(f"{fmt.number(statistics.fmean(values))} under {rule}")
    sent = {
        rule: [b for c in cs if _warm(c) and (b := bytes_per_token(c["architectures"][name])) is not None]
        for rule, cs in by_rule.items()
    }
    parts = [f"{statistics.fmean(values):.0f} under {rule}" for rule, values in sent.items() if values]
    if not sentences or not parts:
        raise NothingToDraw(f"No draft of {fmt.name(name)} was verified above temperature 0.")
    where = fmt.link_phrase(reading.base(comparison)["link"])
    return _capitalised(
        [
            f"Above temperature 0, the share of {fmt.name(name)}'s draft tokens that is accepted averages"
            f" {fmt.joined(sentences)}; a token costs {fmt.joined(parts)} bytes, both ways, {where}."
        ]
    )


def _latency_by_throughput(comparison: JSON) -> str:
    rows = plots_load.drawable(comparison)
    most = max(rows, key=lambda row: float(row.figures[plots_load.THROUGHPUT]))
    closed, opened = plots_load.loads_of(rows)
    points = " and ".join(text for load, text in ((closed, f"solid, {closed}"), (opened, f"dashed, {opened}")) if load)
    return _capitalised(
        [
            f"{fmt.name(most.architecture)} reaches the most, {fmt.number(most.figures[plots_load.THROUGHPUT], 0)}"
            f" tokens/s with {most.load}, at a median TTFT of {fmt.milliseconds(most.summary['ttft_s']['p50'], 0)} ms"
            f" and TPOT of {fmt.milliseconds(most.summary['tpot_s']['p50'])} ms.",
            f"Further right and lower is better. Points of a line, in order: {points}.",
        ]
    )


def _warm(condition: JSON) -> bool:
    return float(condition["sampling"]["temperature"]) > 0


def _capitalised(sentences: list[str]) -> str:
    return " ".join(sentence[:1].upper() + sentence[1:] for sentence in sentences)


FIGURES = (
    Figure("tpot-by-rtt", "Time per token against round trip", _tpot_by_rtt, plots_link.tpot_by_rtt),
    Figure("time-by-cause", "Where the milliseconds go", _time_by_cause, plots_time.time_by_cause),
    Figure("speedup-by-workload", "Speedup by workload", _speedup_by_workload, plots_speedup.speedup_by_workload),
    Figure(
        "tpot-by-length", "Predicted time per token by speculation length", _tpot_by_length, plots_link.tpot_by_length
    ),
    Figure(
        "acceptance-by-position",
        "Acceptance by position and workload",
        _acceptance_by_position,
        plots_acceptance.acceptance_by_position,
    ),
    Figure(
        "latency-by-throughput",
        "Latency against throughput under load",
        _latency_by_throughput,
        plots_load.latency_by_throughput,
    ),
    Figure("tokens-over-time", "Tokens over time", _tokens_over_time, plots_time.tokens_over_time),
    Figure(
        "acceptance-by-temperature",
        "Agreement against rejection",
        _acceptance_by_temperature,
        plots_acceptance.acceptance_by_temperature,
    ),
)
