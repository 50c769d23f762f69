"""Builds the tables of measurements: architectures, links, sampling, causes, workloads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tandem.comparison.report import formatting as fmt
from tandem.comparison.report import reading
from tandem.comparison.report.blocks import Cell, Column, Table, table
from tandem.comparison.report.head_line import head_line
from tandem.comparison.report.reading import JSON

Value = Callable[[JSON], float | None]


@dataclass(frozen=True, slots=True)
class Measure:
    """A column. `better`: min or max, if comparable. `shown`: formats it from an architecture's summary."""

    heading: str
    value: Value
    shown: Callable[[JSON], str]
    better: Callable[[Sequence[float]], float] | None = None


def _plain(digits: int, value: Value) -> Callable[[JSON], str]:
    return lambda of: fmt.number(value(of), digits)


def _ms(key: str) -> Value:
    def value(of: JSON) -> float | None:
        seconds: float | None = of[key]["p50"]
        return None if seconds is None else 1000 * seconds

    return value


def _key(key: str) -> Value:
    def value(of: JSON) -> float | None:
        found: float | None = of[key]
        return found

    return value


def _drafted(key: str) -> Value:
    return lambda of: _key(key)(of) if of["drafted"] else None


def _draft_length(of: JSON) -> float | None:
    return float(of["drafted"] / of["rounds"]) if of["drafted"] else None


def _speedup(of: JSON) -> str:
    return fmt.with_interval(fmt.times(of["speedup_vs_autoregressive"]), of["speedup_interval"])


def _measure(heading: str, value: Value, digits: int, better: Callable[[Sequence[float]], float]) -> Measure:
    return Measure(heading, value, _plain(digits, value), better)


MEASURES = (
    _measure("TTFT p50, ms", _ms("ttft_s"), 1, min),
    _measure("TPOT p50, ms", _ms("tpot_s"), 2, min),
    _measure("tokens/s", _key("output_throughput_token_per_s"), 1, max),
    _measure("acceptance rate", _drafted("acceptance_rate"), 3, max),
    _measure("mean acceptance length", _key("mean_acceptance_length"), 2, max),
    _measure("mean draft length", _draft_length, 2, max),
    _measure("bytes/token up", _key("bytes_up_per_token"), 1, min),
    _measure("bytes/token down", _key("bytes_down_per_token"), 1, min),
    Measure("speedup (95 % interval)", _key("speedup_vs_autoregressive"), _speedup, max),
)


def best_cells(texts: Sequence[str], values: Sequence[float | None], better: Callable[..., float] | None) -> list[Cell]:
    """Marks the best of a column, and ties in the shown digits; marks none if all are equal."""
    known = [value for value in values if value is not None]
    if better is None or not known:
        return [Cell(text) for text in texts]
    top = texts[list(values).index(better(known))]
    alike = all(text == top for text, value in zip(texts, values, strict=True) if value is not None)
    return [Cell(text, best=text == top and not alike) for text in texts]


def architecture_table(comparison: JSON) -> Table:
    """TTFT, TPOT, throughput, acceptance, traffic, speedup and identity under the base condition."""
    found = reading.base(comparison)["architectures"]
    columns = [
        best_cells(
            [_shown(comparison, m, name, of) for name, of in found.items()],
            [m.value(of) for of in found.values()],
            m.better,
        )
        for m in MEASURES
    ]
    identical = [Cell(_identical(name, of)) for name, of in found.items()]
    names = [Cell(fmt.name(name) + _failed(of)) for name, of in found.items()]
    return table(
        f"Architectures, {_setting(comparison)}",
        [Column("architecture", numeric=False), *(Column(m.heading) for m in MEASURES), Column("identical outputs")],
        list(zip(names, *columns, identical, strict=True)),
        "Bold: best in its column. TTFT: time to the first token; TPOT: time per token after it; both at the"
        " client. Mean acceptance length: tokens committed in a round, the target's own included. Bytes are payload:"
        " between draft and target where they are apart, else between client and server. Identical: requests whose"
        f" tokens are those of plain decoding.{_sent_ahead(found)}{_ran_on(found)}{_head(found)}",
    )


def _head(found: JSON) -> str:
    """Says what a head's features paid for."""
    line = head_line(found)
    return "" if line is None else f" {line[0].upper()}{line[1:]}."


def _sent_ahead(found: JSON) -> str:
    """Describes how far ahead of verdicts rounds were sent, and how many of them were stale."""
    return "".join(
        f" {fmt.name(name)} had {fmt.number(ahead['mean_in_flight'])} rounds in flight on average (at most"
        f" {ahead['max_in_flight']}): of those sent ahead, {ahead['guessed_rounds']} were right and"
        f" {ahead['stale_rounds']} stale, with {ahead['stale_drafts']} draft tokens."
        for name, of in found.items()
        if (ahead := of.get("sent_ahead"))
    )


def _ran_on(found: JSON) -> str:
    """Describes what targets that never wait spent without use."""
    return "".join(
        f" The target of {fmt.name(name)} made {ran['run_steps']} steps, {ran['drafted_steps']} with a draft, and"
        f" {ran['wasted_steps']} for nothing; {ran['unverified_drafts']} draft tokens were never verified."
        for name, of in found.items()
        if (ran := of.get("ran_on"))
    )


def _shown(comparison: JSON, measure: Measure, name: str, of: JSON) -> str:
    """Formats a cell; the baseline has no speedup over itself."""
    if measure.heading.startswith("speedup") and name == reading.baseline(comparison):
        return "baseline"
    return measure.shown(of)


def _setting(comparison: JSON) -> str:
    base = reading.base(comparison)
    rule = "" if not base["sampling"]["temperature"] else f", {base['rule']}"
    return f"{fmt.link_phrase(base['link'])}, {fmt.sampling(base['sampling'])}{rule}"


def _failed(of: JSON) -> str:
    return f" ({of['failed']} of {of['requests']} failed)" if of["failed"] else ""


def _identical(name: str, of: JSON) -> str:
    found = of["identical_to_autoregressive"]
    if name == reading.AUTOREGRESSIVE:
        return "reference"
    return f"{found['count']}/{found['total']}" if found else fmt.MISSING


def round_trip_table(comparison: JSON) -> Table | None:
    """Measured TPOT of every architecture on every link; None if there is only one link."""
    conditions = reading.links(comparison)
    if len(conditions) < 2:
        return None
    rows = []
    for condition in conditions:
        found = condition["architectures"]
        texts = [
            fmt.with_interval(fmt.milliseconds(of["tpot_s"]["mean"]), of["tpot_interval"], 1000, 1)
            for of in found.values()
        ]
        cells = best_cells(texts, [of["tpot_s"]["mean"] for of in found.values()], min)
        by_name = dict(zip(found, cells, strict=True))
        names = reading.architectures(comparison)
        rows.append([fmt.rtt(condition["link"]), *(by_name.get(name, Cell(fmt.MISSING)) for name in names)])
    return table(
        "Mean TPOT in milliseconds (95 % interval) by round trip, measured",
        [Column("RTT", numeric=False), *(Column(fmt.name(name)) for name in reading.architectures(comparison))],
        rows,
        "Bold: lowest in its row.",
    )


def cause_table(comparison: JSON) -> Table:
    found = reading.base(comparison)["architectures"]
    causes = list(dict.fromkeys(cause for of in found.values() for cause in of["milliseconds_per_token"]))
    clamped = sum(of["requests_whose_other_seconds_were_clamped_at_0"] for of in found.values())
    return table(
        f"Milliseconds per output token by cause, end to end, {_setting(comparison)}",
        [Column("architecture", numeric=False), *(Column(cause) for cause in causes)],
        [
            [fmt.name(name), *(fmt.number(of["milliseconds_per_token"].get(cause)) for cause in causes)]
            for name, of in found.items()
        ],
        f"In {fmt.plural(clamped, 'request')} the named causes overlapped, and other was set to 0." if clamped else "",
    )


def workload_table(comparison: JSON) -> Table | None:
    """Acceptance and, with a baseline, speedup by workload; None if there is nothing to show."""
    base, names = reading.base(comparison), reading.compared_with_baseline(comparison)
    shown: list[tuple[str, Callable[[JSON], str]]] = [
        ("speedup (95 % interval)", _speedup),
        ("acceptance rate", lambda of: fmt.number(of["acceptance_rate"], 3)),
    ]
    shown = shown if reading.baseline(comparison) else shown[1:]
    found = {name: base["architectures"][name]["workloads"] for name in names}
    rows = [
        [
            fmt.name(kind),
            *(show(of[kind]) if kind in of else fmt.MISSING for of in found.values() for _, show in shown),
        ]
        for kind in reading.workloads(base)
    ]
    if not rows or not names:
        return None
    heads = [Column(f"{fmt.name(name)}: {what}") for name in names for what, _ in shown]
    return table(f"By workload, {_setting(comparison)}", [Column("workload", numeric=False), *heads], rows)


def _rate(of: JSON) -> str:
    low_high = of.get("acceptance_interval")
    spread = f" ({low_high[0]:.2f} to {low_high[1]:.2f})" if low_high else ""
    return fmt.number(of["acceptance_rate"], 3) + spread


def sampling_table(comparison: JSON) -> Table | None:
    """Every combination of sampling and rule for each drafting architecture; None if there is only one."""
    conditions = reading.samplings(comparison)
    if not conditions:
        return None
    rows = []
    for condition in conditions:
        for name, of in condition["architectures"].items():
            if of["drafted"]:
                rows.append(
                    [
                        f"{condition['sampling']['temperature']:g}", condition["rule"], fmt.name(name),
                        _rate(of), fmt.number(of["mean_acceptance_length"]),
                        fmt.milliseconds(of["tpot_s"]["p50"], 2), fmt.number(of["bytes_up_per_token"], 1),
                        fmt.number(of["bytes_down_per_token"], 1), _speedup(of), _identical(name, of),
                    ]
                )  # fmt: skip
    heads = ("acceptance rate (95 % interval)", "mean acceptance length", "TPOT p50, ms", "bytes/token up",
             "bytes/token down", "speedup (95 % interval)", "identical outputs")  # fmt: skip
    return table(
        f"Temperature and verification rule, {fmt.link_phrase(reading.base(comparison)['link'])}",
        [Column("temperature"), Column("rule", False), Column("architecture", False), *map(Column, heads)],
        rows,
        "Agreement commits the target's own draws, so the tokens are those of plain decoding; rejection keeps their"
        " distribution, not the tokens, and no identity is claimed.",
    )


def link_table(comparison: JSON) -> Table:
    """The settings of every link and its measured round trips."""
    rows = [
        [
            condition["name"], fmt.link_kind(condition["link"]["kind"]), fmt.number(condition["link"]["rtt_ms"], 0),
            fmt.number(condition["link"]["bandwidth_mbps"], 0),
            fmt.milliseconds(condition["link"]["direct_round_trip_s"], 2),
            fmt.milliseconds(condition["link"]["round_trip_s"], 2),
            fmt.milliseconds(condition["link"]["added_s"], 2),
        ]
        for condition in reading.links(comparison)
    ]  # fmt: skip
    heads = ("configured RTT, ms", "bandwidth, Mbit/s", "round trip without the link, ms",
             "round trip over the link, ms", "added by the emulation, ms")  # fmt: skip
    return table(
        "Links",
        [Column("condition", False), Column("kind", False), *map(Column, heads)],
        rows,
        "Round trips are medians of a small message, measured in this run. Added by the emulation: what remains after"
        " the direct round trip and the configured RTT.",
    )
