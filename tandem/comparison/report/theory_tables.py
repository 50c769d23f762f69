"""Builds the tables and sentences that compare theory with measurement."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from tandem.comparison.analysis.doubt import MISSED
from tandem.comparison.report import formatting as fmt
from tandem.comparison.report import reading
from tandem.comparison.report.blocks import Block, Cell, Details, Table, Text, bullets, numbers, table, words
from tandem.comparison.report.reading import JSON
from tandem.comparison.report.tables import named

STEPS = {"draft": "drafting g tokens", "verify": "verifying n positions"}


def derived(comparison: JSON) -> Text | None:
    """Returns what follows from the component times; None if nothing was predicted."""
    theory = comparison["theory"]
    if theory is None:
        return None
    missed = [fmt.name(name) for name in reading.missed(comparison)]
    warned = [f"Do not rely on what follows: predictions missed {fmt.joined(missed)}."] if missed else []
    return bullets("What follows from the component times", [*warned, *findings(theory)])


def basis(comparison: JSON) -> list[Block]:
    """Returns the best lengths, and what predictions start from, folded."""
    if (theory := comparison["theory"]) is None:
        return []
    assumed = [bullets("What the predictions assume", theory["notes"])] if theory["notes"] else []
    return [
        length_table(comparison),
        Details("What the predictions start from", (*cost_tables(theory), acceptance_table(theory), *assumed)),
    ]


def break_even(theory: JSON, digits: int = 0) -> str:
    if (even := theory["break_even_rtt_s"]) is None:
        return "No break-even between distributed and plain decoding was predicted."
    return fmt.break_even(even, theory["break_even_interval_s"], theory["measured_break_even_rtt_s"], digits)


def findings(theory: JSON) -> list[str]:
    """Returns one sentence for each derived figure, or that it is missing."""
    errors = [abs(p["error"]) for p in theory["predictions"] if p["error"] is not None]
    sentences = []
    if errors:
        sentences.append(
            f"Predicted TPOT is off by {fmt.percent(statistics.median(errors), 1)} in the median and"
            f" {fmt.percent(max(errors), 1)} at most, over {fmt.plural(len(errors), 'measured figure')}."
        )
    sentences.append(break_even(theory, 1))
    if theory["measured_break_even_rtt_s"] is None and len({p["rtt_ms"] for p in theory["predictions"]}) > 1:
        sentences.append("Measured, the two do not cross between any two of the links.")
    if (over := theory["distributed_over_fused_s"]) is not None:
        sentences.append(fmt.over_fused(over, 2))
    if (gain := theory["capacity_gain"]) is not None:
        sentences.append(
            f"One target serves {fmt.times(gain)} the clients with remote drafts as with local ones, if the target"
            " is the bottleneck (predicted)."
        )
    if busy := theory["target_s_per_token"]:
        parts = [f"{fmt.name(name)} {fmt.ms(seconds)}" for name, seconds in busy.items()]
        sentences.append(f"The target's device is busy for each token: {', '.join(parts)}.")
    return sentences


def _rtt(comparison: JSON, rtt_ms: float, name: str | None = None) -> str:
    """Names the measured link of this round trip or of the condition `name`, else the round trip."""
    links = (c for c in reading.links(comparison) if name in (None, c["name"]) and c["link"]["rtt_ms"] == rtt_ms)
    found = next(links, None)
    return fmt.rtt(found["link"]) if found else f"{rtt_ms:g} ms"


def prediction_table(comparison: JSON) -> Table | None:
    if comparison["theory"] is None or not comparison["theory"]["predictions"]:
        return None
    return table(
        "Predicted and measured TPOT",
        [*words("RTT", "architecture"), *numbers("predicted, ms", "measured, ms", "error")],
        [
            [
                _rtt(comparison, p["rtt_ms"], p["condition"]),
                named(p["architecture"]),
                fmt.milliseconds(p["predicted_tpot_s"], 2),
                "not measured" if p["measured_tpot_s"] is None else fmt.milliseconds(p["measured_tpot_s"], 2),
                _error(p),
            ]
            for p in comparison["theory"]["predictions"]
        ],
        f"Error: predicted / measured − 1. Missed: off by more than a factor of {MISSED:g}, so not to be relied on.",
    )


def _error(prediction: JSON) -> Cell:
    text = fmt.percent(prediction["error"], 1, sign=True)
    return Cell(f"{text}, missed", tone="bad") if prediction.get("missed") else Cell(text)


def length_table(comparison: JSON) -> Table:
    theory = comparison["theory"]
    ran = theory["length"]
    return table(
        "Best speculation length, predicted" if ran is not None else "Best fixed speculation length, predicted",
        [
            *words("RTT", "architecture"),
            *numbers("best length", "closed form", "TPOT there, ms", f"TPOT at {fmt.length(ran)} (ran), ms"),
        ],
        [
            [
                _rtt(comparison, best["rtt_ms"]),
                fmt.name(best["architecture"]),
                f"{best['length']}" + (" (plain decoding)" if best["length"] == 0 else ""),
                fmt.number(best["closed_form"]),
                fmt.milliseconds(best["tpot_s"], 2),
                fmt.milliseconds(_as_ran(theory, best), 2),
            ]
            for best in theory["best_lengths"]
        ],
        "Best length: the integer optimum under the measured rates. Closed form: the continuous optimum under one rate"
        " for all positions; it does not consider plain decoding.",
    )


def _as_ran(theory: JSON, best: JSON) -> float | None:
    """Returns the predicted TPOT of the length that ran, or of the lengths that auto chose."""
    if theory["length"] is not None:
        return next(iter(best["tpot_s_by_length"][theory["length"] :]), None)
    of = (p for p in theory["predictions"] if all(p[key] == best[key] for key in ("architecture", "rtt_ms")))
    return next((float(p["predicted_tpot_s"]) for p in of), None)


def cost_tables(theory: JSON) -> list[Table]:
    """The fitted component times, and their intervals and which were held at 0 unless the file is without them."""
    found = theory["costs"]["architectures"]
    costs = table(
        "Component times, measured in this run",
        [
            *words("architecture"),
            *numbers("g draft tokens, ms", "verifying n positions, ms", "overhead of a round, ms"),
            *numbers("RPC of a round trip, ms", "bytes of a round"),
        ],
        [
            [
                fmt.name(name),
                _line(of["draft_fixed_s"], of["draft_slope_s"], "g"),
                _line(of["verify_fixed_s"], of["verify_slope_s"], "n"),
                fmt.milliseconds(of["round_overhead_s"], 2),
                fmt.milliseconds(of["rpc_s"], 2),
                fmt.number(of["message_bytes"], 0),
            ]
            for name, of in found.items()
        ],
        f"A plain target step takes {fmt.ms(theory['costs']['plain_s'], 2)}. Fitted by least squares, constrained to be"
        " non-negative.",
    )
    fits = [
        [
            fmt.name(name),
            STEPS[step],
            *(
                fmt.with_interval(fmt.milliseconds(of[f"{step}_{part}_s"], 2), fit[f"{part}_interval_s"], 1000)
                for part in ("fixed", "slope")
            ),
            fmt.MISSING
            if fit["held_at_0"] is None
            else f"{fit['held_at_0']} part, else {fmt.milliseconds(fit['unheld_s'], 2)}".replace("-", "−"),
        ]
        for name, of in found.items()
        for step, fit in (of.get("fits") or {}).items()
    ]
    confidence = table(
        "Confidence of the component times",
        [
            *words("architecture", "step"),
            *numbers("fixed, ms (95 % interval)", "per token, ms (95 % interval)", "held at 0"),
        ],
        fits,
        "Intervals: bootstrap over the calibration requests; none for too few. Held at 0: the part that plain least"
        " squares makes negative, with its unconstrained value; the best non-negative line is used instead.",
    )
    return [costs, confidence] if fits else [costs]


def _line(fixed_s: float, slope_s: float, of: str) -> str:
    """Formats '36.60 + 0.50 n' milliseconds, or a dash if there is no such step."""
    if not fixed_s and not slope_s:
        return fmt.MISSING
    sign = "−" if slope_s < 0 else "+"
    return f"{fmt.milliseconds(fixed_s, 2)} {sign} {fmt.milliseconds(abs(slope_s), 2)} {of}"


def acceptance_table(theory: JSON) -> Table:
    auto = theory["length"] is None
    return table(
        "Acceptance that the predictions start from",
        [
            *words("architecture"),
            *numbers("each position, given those before", "tokens a round", *(["at fixed lengths"] if auto else [])),
        ],
        [
            [
                fmt.name(name),
                _rates(of["conditional"]),
                fmt.number(of["tokens_per_round"]),
                *([_rates(of["at_fixed_lengths"])] if auto else []),
            ]
            for name, of in theory["acceptance"].items()
        ],
    )


def _rates(rates: Sequence[float]) -> str:
    return ", ".join(fmt.number(rate) for rate in rates) or fmt.MISSING
