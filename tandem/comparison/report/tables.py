"""Builds the tables of measurements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tandem.comparison.measuring.architectures import AUTOREGRESSIVE
from tandem.comparison.report import formatting as fmt
from tandem.comparison.report import reading
from tandem.comparison.report.blocks import Cell, Column, Table, numbers, table, words
from tandem.comparison.report.reading import JSON
from tandem.comparison.report.statements import notes

SPEEDUP = "speedup_vs_autoregressive"
Better = Callable[..., float] | None


@dataclass(frozen=True, slots=True)
class Measure:
    """A column with a figure of an architecture. `page`, `terminal`: its heading there; "": not shown there.

    `value`: a figure, or two that share a column. `better`: min or max, if comparable.
    """

    page: str
    terminal: str
    value: Callable[[JSON], Any]
    digits: int
    better: Better = None


def statistic_ms(metric: str, statistic: str) -> Callable[[JSON], float | None]:
    return lambda of: None if of[metric][statistic] is None else 1000 * of[metric][statistic]


def _rate(of: JSON) -> float | None:
    return of["acceptance_rate"] if of["drafted"] else None


def _propose_rate(of: JSON) -> float | None:
    return of.get("propose_rate") if of["drafted"] else None  # older files have none


MEASURES = (
    Measure("TTFT p50, ms", "TTFT\np50 ms", statistic_ms("ttft_s", "p50"), 1, min),
    Measure("TPOT p50, ms", "TPOT\np50 ms", statistic_ms("tpot_s", "p50"), 2, min),
    Measure("tokens/s", "tokens\n/s", lambda of: of["output_throughput_token_per_s"], 1, max),
    Measure("propose rate", "", _propose_rate, 3),
    Measure("acceptance rate", "accept\nrate", _rate, 3, max),
    Measure("mean acceptance length", "mean\naccept\nlength", lambda of: of["mean_acceptance_length"], 2, max),
    Measure("", "rounds", lambda of: of["rounds"], 0),
    Measure("mean draft length", "", lambda of: of["drafted"] / of["rounds"] if of["drafted"] else None, 2, max),
    Measure("bytes/token up", "", lambda of: of["bytes_up_per_token"], 1, min),
    Measure("bytes/token down", "", lambda of: of["bytes_down_per_token"], 1, min),
    Measure("", "bytes/tok\nup/down", lambda of: (of["bytes_up_per_token"], of["bytes_down_per_token"]), 1),
)
IDENTICAL = Column("identical outputs", brief="iden-\ntical")
REFERENCE = Cell("reference", brief="ref")


def best_cells(
    cells: Sequence[Cell], values: Sequence[float | None], better: Callable[..., float] | None
) -> list[Cell]:
    """Marks the best of a column, and ties in the shown digits; marks none if all are equal."""
    known = [value for value in values if value is not None]
    if better is None or not known:
        return list(cells)
    top = cells[list(values).index(better(known))].text
    alike = all(cell.text == top for cell, value in zip(cells, values, strict=True) if value is not None)
    return [replace(cell, best=cell.text == top and not alike) for cell in cells]


def measured_cells(measure: Measure, found: Sequence[JSON]) -> list[Cell]:
    values = [measure.value(of) for of in found]
    parts = [value if isinstance(value, tuple) else (value,) for value in values]
    cells = [Cell("/".join(fmt.number(part, measure.digits) for part in each)) for each in parts]
    return best_cells(cells, values, measure.better)


def _speedup(of: JSON) -> Cell:
    text = fmt.times(of[SPEEDUP])
    return Cell(fmt.with_interval(text, of["speedup_interval"]), brief=text)


def named(name: str, failed: str = "") -> Cell:
    """Names an architecture or a workload: without underscores on pages; and says how many requests failed."""
    text = fmt.name(name)
    if failed:
        return Cell(f"{text} ({failed})", brief=f"{name}\n  {failed}", tone="bad")
    return Cell(text, brief=name)


def identical(of: JSON) -> Cell:
    """Returns how many outputs are those of plain decoding."""
    found = of["identical_to_autoregressive"]
    if not found or not found["total"]:
        return Cell(fmt.MISSING)
    return Cell(f"{found['count']}/{found['total']}", tone="good" if found["count"] == found["total"] else "bad")


def architecture_table(comparison: JSON, condition: JSON | None = None) -> Table:
    """TTFT, TPOT, throughput, acceptance, traffic, speedup and identity under a condition (None: the base)."""
    found, baseline = (condition or reading.base(comparison))["architectures"], reading.baseline(comparison)
    columns = [measured_cells(measure, list(found.values())) for measure in MEASURES]
    speedups = [Cell("baseline", brief="base") if name == baseline else _speedup(of) for name, of in found.items()]
    columns.append(best_cells(speedups, [of[SPEEDUP] for of in found.values()], max))
    columns.append([REFERENCE if name == AUTOREGRESSIVE.name else identical(of) for name, of in found.items()])
    rows: list[list[Cell]] = []
    for (name, of), *cells in zip(found.items(), *columns, strict=True):
        rows.append([named(name, f"{of['failed']} of {of['requests']} failed" if of["failed"] else ""), *cells])
    heads = [Column(measure.page, brief=measure.terminal) for measure in MEASURES]
    return table(
        f"Architectures, {_setting(comparison)}",
        [*words("architecture"), *heads, Column("speedup (95 % interval)", brief="speed\nup", leads=True), IDENTICAL],
        rows,
        "Bold: best in its column. TTFT: time to the first token; TPOT: time per token after it; both at the"
        " client. Mean acceptance length: tokens committed in a round, the target's own included. Bytes are payload:"
        " between draft and target where they are apart, else between client and server. Identical: requests whose"
        f" tokens are those of plain decoding.{''.join(f' {fmt.capitalised(line)}' for line in notes(found))}",
        (_title(comparison, condition), ""),
    )


def other_tables(comparison: JSON) -> list[Table]:
    """The same of the other conditions without a load."""
    others = [condition for condition in comparison["conditions"][1:] if condition["varies"] != "load"]
    return [architecture_table(comparison, condition) for condition in others]


def _title(comparison: JSON, condition: JSON | None) -> str:
    """Names the condition if there are several, and the link if it is emulated."""
    of = condition or reading.base(comparison)
    measured = of["link"]["round_trip_s"] is not None
    if len(comparison["conditions"]) == 1 and not measured:
        return "Architectures"
    return f"Architectures: {of['name']}" + (f", {of['link']['kind']} {fmt.link(of['link'])}" if measured else "")


def _setting(comparison: JSON) -> str:
    base = reading.base(comparison)
    rule = "" if not base["sampling"]["temperature"] else f", {base['rule']}"
    return f"{fmt.link_phrase(base['link'])}, {fmt.sampling(base['sampling'])}{rule}"


def round_trip_table(comparison: JSON) -> Table | None:
    """Measured TPOT of every architecture on every link; None if there is only one link."""
    conditions, names = reading.links(comparison), reading.architectures(comparison)
    if len(conditions) < 2:
        return None
    rows = []
    for condition in conditions:
        found = condition["architectures"]
        means = [of["tpot_s"]["mean"] for of in found.values()]
        cells = [
            Cell(fmt.with_interval(fmt.milliseconds(mean), of["tpot_interval"], 1000, 1))
            for mean, of in zip(means, found.values(), strict=True)
        ]
        by_name = dict(zip(found, best_cells(cells, means, min), strict=True))
        rows.append([fmt.rtt(condition["link"]), *(by_name.get(name, fmt.MISSING) for name in names)])
    return table(
        "Mean TPOT in milliseconds (95 % interval) by round trip, measured",
        [*words("RTT"), *numbers(*map(fmt.name, names))],
        rows,
        "Bold: lowest in its row.",
    )


def cause_table(comparison: JSON) -> Table:
    found = reading.base(comparison)["architectures"]
    causes = list(dict.fromkeys(cause for of in found.values() for cause in of["milliseconds_per_token"]))
    clamped = sum(of["requests_whose_other_seconds_were_clamped_at_0"] for of in found.values())
    note = (
        f"In {fmt.plural(clamped, 'request')} the named causes overlapped, and other was set to 0." if clamped else ""
    )
    return table(
        f"Milliseconds per output token by cause, end to end, {_setting(comparison)}",
        [*words("architecture"), *numbers(*causes)],
        [
            [named(name), *(fmt.number(of["milliseconds_per_token"].get(cause)) for cause in causes)]
            for name, of in found.items()
        ],
        note,
        ("Milliseconds per token, by cause", note),
    )


def workload_table(comparison: JSON) -> Table | None:
    """Acceptance and, with a baseline, speedup by workload; None if there is nothing to show."""
    base, names = reading.base(comparison), reading.compared_with_baseline(comparison)
    kinds = reading.workloads(base)
    if not kinds or not names:
        return None
    shown: list[tuple[str, str, Callable[[JSON], Cell]]] = [
        ("speedup (95 % interval)", "speedup", _speedup),
        ("acceptance rate", "accept rate", lambda of: Cell(fmt.number(of["acceptance_rate"], 3))),
    ]
    shown = shown if reading.baseline(comparison) else shown[1:]
    found = [base["architectures"][name]["workloads"] for name in names]
    heads = [
        Column(f"{fmt.name(name)}: {page}", brief=f"{name}\n{brief}") for name in names for page, brief, _ in shown
    ]
    rows = [
        [named(kind), *(show(of[kind]) if kind in of else fmt.MISSING for of in found for *_, show in shown)]
        for kind in kinds
    ]
    caption = f"By workload, {_setting(comparison)}"
    return table(caption, [*words("workload"), *heads], rows, brief=("By workload", ""))


def sampling_table(comparison: JSON) -> Table | None:
    """Every combination of sampling and rule for each drafting architecture; None if there is only one."""
    if not (conditions := reading.samplings(comparison)):
        return None
    rows = [
        [
            f"{condition['sampling']['temperature']:g}",
            condition["rule"],
            fmt.name(name),
            fmt.with_interval(fmt.number(of["acceptance_rate"], 3), of.get("acceptance_interval")),
            fmt.number(of["mean_acceptance_length"]),
            fmt.milliseconds(of["tpot_s"]["p50"], 2),
            fmt.number(of["bytes_up_per_token"], 1),
            fmt.number(of["bytes_down_per_token"], 1),
            _speedup(of),
            REFERENCE if name == AUTOREGRESSIVE.name else identical(of),
        ]
        for condition in conditions
        for name, of in condition["architectures"].items()
        if of["drafted"]
    ]
    heads = ("acceptance rate (95 % interval)", "mean acceptance length", "TPOT p50, ms", "bytes/token up",
             "bytes/token down", "speedup (95 % interval)", "identical outputs")  # fmt: skip
    return table(
        f"Temperature and verification rule, {fmt.link_phrase(reading.base(comparison)['link'])}",
        [*numbers("temperature"), *words("rule", "architecture"), *numbers(*heads)],
        rows,
        "Agreement commits the target's own draws, so the tokens are those of plain decoding; rejection keeps their"
        " distribution, not the tokens, and no identity is claimed.",
    )


LINK_KINDS = {
    "direct": "direct: not emulated",
    "emulated": "emulated: a delay proxy on loopback",
}


def emulated_links(comparison: JSON) -> Table | None:
    """The same as `link_table`; None if no link was emulated, so that there is nothing to measure."""
    emulated = any(condition["link"]["round_trip_s"] is not None for condition in reading.links(comparison))
    return link_table(comparison) if emulated else None


def link_table(comparison: JSON) -> Table:
    """The settings of every link and its measured round trips."""
    heads = {
        "configured RTT, ms": "set\nRTT ms",
        "bandwidth, Mbit/s": "Mbit\n/s",
        "round trip without the link, ms": "without\nlink, ms",
        "round trip over the link, ms": "over\nlink, ms",
        "added by the emulation, ms": "added\nms",
    }
    times = ("direct_round_trip_s", "round_trip_s", "added_s")
    return table(
        "Links",
        [*words("condition", "kind"), *(Column(head, brief=brief) for head, brief in heads.items())],
        [
            [
                condition["name"],
                LINK_KINDS.get(link["kind"], link["kind"]) + fmt.but(link),
                *(fmt.number(link[key], 0) for key in ("rtt_ms", "bandwidth_mbps")),
                *(fmt.milliseconds(link[key], 2) for key in times),
            ]
            for condition in reading.links(comparison)
            for link in (condition["link"],)
        ],
        "Round trips are medians of a small message, measured in this run. Added by the emulation: what remains after"
        " the direct round trip and the configured RTT.",
    )
