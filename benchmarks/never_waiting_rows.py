"""Compares the times per token that `benchmarks.never_waiting` measured with plain decoding's, and shows them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.table import Table

from benchmarks.never_waiting_inputs import draft_seconds, simulated
from tandem.comparison.measuring.records import Measurement
from tandem.speculation.never_waiting_theory import RunCosts

PLAIN = "plain"
WORST = 1.03
"""Limit of the time per token at a target that never waits, over that of plain decoding, at any round trip."""


@dataclass(frozen=True, slots=True)
class Row:
    """One round trip and workload ("all": every one). Seconds; `ratio`: median of paired requests, to plain's."""

    rtt_ms: float
    workload: str
    requests: int
    tpot_s: dict[str, float]
    ratio: dict[str, float]
    mean_s: dict[str, float]
    """Seconds per token after the first, over all requests together."""
    simulated_s: float
    """Seconds per token of the simulated client, which is compared with `mean_s`."""
    round_trip_s: float
    """Seconds that rounds of the worker that waits spent neither drafting nor at the target."""
    draft_s: float
    step_s: float
    """Mean of a step of the row's plain requests, to which the simulated step times are scaled."""
    wasted_steps: float
    stale_drafts: float
    bytes_per_token: float
    identical: bool
    steps_per_token: dict[str, float]


def row(
    rtt_ms: float,
    workload: str,
    found: dict[str, list[Measurement]],
    sequences: Sequence[Sequence[int]],
    step: Callable[[int], float],
    round_trip: float,
) -> Row:
    """Computes a row from the requests of each mode, in the same order, with the ranks of their outputs."""
    plain, runs = found[PLAIN], found["never-waiting"]
    outputs = {mode: [m.output_token_ids for m in ms] for mode, ms in found.items()}
    own = sum(m.seconds_by_cause.verify for m in plain) / sum(m.rounds for m in plain)
    draft = draft_seconds(runs)
    costs = RunCosts(draft, lambda tokens: own * step(tokens) / step(1), round_trip)
    tokens = sum(m.output_tokens for m in runs)
    return Row(
        rtt_ms,
        workload,
        len(plain),
        {mode: statistics.median(map(_tpot, ms)) for mode, ms in found.items()},
        {
            mode: statistics.median(_tpot(m) / _tpot(p) for m, p in zip(ms, plain, strict=True))
            for mode, ms in found.items()
        },
        {mode: sum(map(_after_first, ms)) / sum(m.output_tokens - 1 for m in ms) for mode, ms in found.items()},
        simulated(sequences, costs),
        round_trip,
        draft,
        own,
        sum(m.wasted_steps for m in runs) / sum(m.rounds for m in runs),
        sum(m.stale_drafts for m in runs) / tokens,
        sum(m.bytes_up + m.bytes_down for m in runs) / tokens,
        all(tokens == outputs[PLAIN] for tokens in outputs.values()),
        {mode: sum(m.rounds for m in ms) / sum(m.output_tokens for m in ms) for mode, ms in found.items()},
    )


def _after_first(measurement: Measurement) -> float:
    return measurement.end_to_end_latency_s - measurement.ttft_s


def _tpot(measurement: Measurement) -> float:
    return _after_first(measurement) / max(1, measurement.output_tokens - 1)


def table(rows: Sequence[Row]) -> Table:
    shown = Table(title="Median ratio of the time per token to plain decoding's over the same link")
    modes = [mode for mode in rows[0].ratio if mode != PLAIN]
    for heading in ("RTT", "workload", "n", "plain ms", *modes, "never/\nsimulated", "round\ntrip",
                    "t_d", "t_v", "wasted\nsteps", "stale/\ntoken", "bytes/\ntoken", "same\ntokens"):  # fmt: skip
        shown.add_column(heading, justify="right")
    for r in rows:
        shown.add_row(
            f"{r.rtt_ms:g}",
            r.workload,
            str(r.requests),
            f"{1000 * r.tpot_s[PLAIN]:.1f}",
            *(f"{r.ratio[mode]:.2f}" for mode in modes),
            f"{r.mean_s['never-waiting'] / r.simulated_s:.2f}",
            f"{1000 * r.round_trip_s:.1f}",
            f"{1000 * r.draft_s:.2f}",
            f"{1000 * r.step_s:.1f}",
            f"{r.wasted_steps:.1%}",
            f"{r.stale_drafts:.1f}",
            f"{r.bytes_per_token:.0f}",
            "yes" if r.identical else "NO",
        )
    return shown


def verdict(rows: Sequence[Row]) -> str:
    lines: list[str] = []
    for r in rows:
        if r.ratio["never-waiting"] > WORST:
            lines.append(f"RTT {r.rtt_ms:g} ms, {r.workload}: {r.ratio['never-waiting']:.2f} of plain, above {WORST}")
    if all(r.ratio["never-waiting"] <= WORST for r in rows):
        lines.append(f"never waiting takes at most {WORST} of plain decoding's time per token everywhere")
    return "\n".join(lines)
