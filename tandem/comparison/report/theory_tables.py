"""Builds the tables and sentences that compare theory with measurement."""

from __future__ import annotations

import statistics

from tandem.comparison.report import formatting as fmt
from tandem.comparison.report import reading
from tandem.comparison.report.blocks import Bullets, Column, Paragraph, Table, table
from tandem.comparison.report.reading import JSON


def why_no_theory(comparison: JSON) -> str:
    names = reading.architectures(comparison)
    if not set(names) & set(reading.PLAIN):
        return "No predictions: plain decoding did not run, and every prediction starts from the cost of its step."
    if not any(reading.drafting(condition) for condition in comparison["conditions"]):
        return "No predictions: nothing was drafted, so there is no acceptance to predict from."
    return "No predictions: the component times that they start from were not measured in this run."


def theory_blocks(comparison: JSON) -> list[Table | Paragraph | Bullets]:
    theory = comparison["theory"]
    if theory is None:
        return [Paragraph(why_no_theory(comparison))]
    notes = [Bullets("What the predictions assume", tuple(theory["notes"]))] if theory["notes"] else []
    return [
        Bullets("What follows from the component times", tuple(findings(theory))),
        prediction_table(comparison),
        length_table(comparison),
        cost_table(theory),
        *fit_tables(theory),
        acceptance_table(theory),
        *notes,
    ]


def findings(theory: JSON) -> list[str]:
    """Returns one sentence for each derived figure, or that it is missing."""
    errors = [abs(p["error"]) for p in theory["predictions"] if p["error"] is not None]
    sentences = []
    if errors:
        sentences.append(
            f"Predicted TPOT is off by {fmt.percent(statistics.median(errors), 1)} in the median and"
            f" {fmt.percent(max(errors), 1)} at most, over {fmt.plural(len(errors), 'measured figure')}."
        )
    even, spread, seen = (
        theory[key] for key in ("break_even_rtt_s", "break_even_interval_s", "measured_break_even_rtt_s")
    )
    if even is None:
        sentences.append("Break-even round trip of distributed against plain decoding: not predicted.")
    else:
        text = fmt.with_interval(f"{fmt.milliseconds(even)} ms", spread, 1000, 1)
        never = " (negative: distributed never wins)" if even <= 0 else ""
        sentences.append(f"Break-even round trip of distributed against plain decoding: {text} predicted{never}.")
    if seen is not None:
        sentences.append(f"Measured, the two cross at {fmt.milliseconds(seen)} ms.")
    elif len({p["rtt_ms"] for p in theory["predictions"]}) > 1:
        sentences.append("Measured, the two do not cross between any two of the links.")
    over = theory["distributed_over_fused_s"]
    if over is not None:
        less = "more" if over >= 0 else "less"
        sentences.append(
            f"Distributed pays {fmt.milliseconds(abs(over), 2)} ms a token {less} than fused at the base link,"
            " measured."
        )
    gain = theory["capacity_gain"]
    if gain is not None:
        sentences.append(
            f"One target serves {fmt.times(gain)} the clients with remote drafts as with local ones, if the target"
            " is the bottleneck (predicted)."
        )
    busy = theory["target_s_per_token"]
    if busy:
        parts = [f"{fmt.name(name)} {fmt.milliseconds(seconds)} ms" for name, seconds in busy.items()]
        sentences.append(f"The target's device is busy for each token: {', '.join(parts)}.")
    return sentences


def prediction_table(comparison: JSON) -> Table:
    links = {c["name"]: c["link"] for c in comparison["conditions"]}
    rows = []
    for p in comparison["theory"]["predictions"]:
        link = links.get(p["condition"])
        rows.append(
            [
                fmt.rtt(link) if link else f"{p['rtt_ms']:g} ms",
                fmt.name(p["architecture"]),
                fmt.milliseconds(p["predicted_tpot_s"], 2),
                "not measured" if p["measured_tpot_s"] is None else fmt.milliseconds(p["measured_tpot_s"], 2),
                fmt.percent(p["error"], 1, sign=True),
            ]
        )
    return table(
        "Predicted and measured TPOT",
        [Column("RTT", False), Column("architecture", False), Column("predicted, ms"), Column("measured, ms"),
         Column("error")],
        rows,
        "Error: predicted / measured − 1.",
    )  # fmt: skip


def length_table(comparison: JSON) -> Table:
    links = {float(c["link"]["rtt_ms"]): c["link"] for c in reversed(reading.links(comparison))}
    theory = comparison["theory"]
    ran = theory["length"]
    rows = []
    for best in theory["best_lengths"]:
        by_length = best["tpot_s_by_length"]
        at_ran = by_length[ran] if ran < len(by_length) else None
        link = links.get(float(best["rtt_ms"]))
        rows.append(
            [
                fmt.rtt(link) if link else f"{best['rtt_ms']:g} ms",
                fmt.name(best["architecture"]),
                f"{best['length']}" + (" (plain decoding)" if best["length"] == 0 else ""),
                fmt.number(best["closed_form"]),
                fmt.milliseconds(best["tpot_s"], 2),
                fmt.milliseconds(at_ran, 2),
            ]
        )
    return table(
        "Best speculation length, predicted",
        [Column("RTT", False), Column("architecture", False), Column("best length"), Column("closed form"),
         Column("TPOT there, ms"), Column(f"TPOT at {ran} (ran), ms")],
        rows,
        "Best length: the integer optimum under the measured rates. Closed form: the continuous optimum under one rate"
        " for all positions; it does not consider plain decoding.",
    )  # fmt: skip


def cost_table(theory: JSON) -> Table:
    rows = [
        [
            fmt.name(name),
            _line(of["draft_fixed_s"], of["draft_slope_s"], "g"),
            _line(of["verify_fixed_s"], of["verify_slope_s"], "n"),
            fmt.milliseconds(of["round_overhead_s"], 2),
            fmt.milliseconds(of["rpc_s"], 2),
            fmt.number(of["message_bytes"], 0),
        ]
        for name, of in theory["costs"]["architectures"].items()
    ]
    return table(
        "Component times, measured in this run",
        [Column("architecture", False), Column("g draft tokens, ms"), Column("verifying n positions, ms"),
         Column("overhead of a round, ms"), Column("RPC of a round trip, ms"), Column("bytes of a round")],
        rows,
        f"A plain target step takes {fmt.milliseconds(theory['costs']['plain_s'], 2)} ms. Fitted by least squares,"
        " constrained to be non-negative.",
    )  # fmt: skip


STEPS = {"draft": "drafting g tokens", "verify": "verifying n positions"}


def fit_tables(theory: JSON) -> list[Table]:
    """The intervals of the fitted parts and which were held at 0; no table for files without them."""
    rows = [
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
        for name, of in theory["costs"]["architectures"].items()
        for step, fit in (of.get("fits") or {}).items()
    ]
    heads = ("fixed, ms (95 % interval)", "per token, ms (95 % interval)", "held at 0")
    shown = table(
        "Confidence of the component times",
        [Column("architecture", False), Column("step", False), *map(Column, heads)],
        rows,
        "Intervals: bootstrap over the calibration requests; none for too few. Held at 0: the part that plain least"
        " squares makes negative, with its unconstrained value; the best non-negative line is used instead.",
    )
    return [shown] if rows else []


def _line(fixed_s: float, slope_s: float, of: str) -> str:
    """Formats '36.60 + 0.50 n' milliseconds, or a dash if there is no such step."""
    if not fixed_s and not slope_s:
        return fmt.MISSING
    sign = "−" if slope_s < 0 else "+"
    return f"{fmt.milliseconds(fixed_s, 2)} {sign} {fmt.milliseconds(abs(slope_s), 2)} {of}"


def acceptance_table(theory: JSON) -> Table:
    return table(
        "Acceptance that the predictions start from",
        [Column("architecture", False), Column("each position, given those before"), Column("tokens a round")],
        [
            [
                fmt.name(name),
                ", ".join(fmt.number(rate) for rate in of["conditional"]) or fmt.MISSING,
                fmt.number(of["tokens_per_round"]),
            ]
            for name, of in theory["acceptance"].items()
        ],
    )
