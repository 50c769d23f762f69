"""SYNTHETIC: the theory and the decision of the example comparison. Nothing here was measured."""

from __future__ import annotations

from typing import Any

from tandem.speculation import theory
from tandem.speculation.theory import StepCosts

JSON = dict[str, Any]
COSTS = StepCosts(draft=0.0027, plain=0.0373, verify_fixed=0.0366, verify_slope=0.0005)
OVERHEAD_S, RPC_S, LENGTH, LONGEST = 0.0017, 0.0014, 3, 12


def theory_and_decision(conditions: list[JSON]) -> tuple[JSON, JSON]:
    base = conditions[0]["architectures"]
    rates = base["fused"]["conditional_acceptance_by_position"]
    names = list(base)
    links = [c for c in conditions if c["varies"] in ("base", "link")]
    even = theory.break_even_rtt(COSTS, rates) - RPC_S
    predictions = []
    for condition in links:
        rtt = condition["link"]["rtt_ms"]
        for name in [*names, "pipelined"]:
            predicted = tpot(name, rtt / 1000, rates)
            of = condition["architectures"].get(name)
            measured = of["tpot_s"]["mean"] if of else None
            predictions.append(
                {"architecture": name, "condition": condition["name"], "rtt_ms": rtt, "predicted_tpot_s": predicted,
                 "measured_tpot_s": measured, "error": predicted / measured - 1 if measured else None,
                 "missed": bool(measured) and not 0.8 <= predicted / measured <= 1.25}
            )  # fmt: skip
    found = {
        "costs": {"plain_s": COSTS.plain, "architectures": {name: _costs(name) for name in names}},
        "acceptance": {
            name: {"conditional": rates, "tokens_per_round": theory.expected_tokens_measured(rates),
                   "output_tokens": 64.0}
            for name in names[1:]
        },
        "length": LENGTH,
        "predictions": predictions,
        "curve": [
            {"rtt_ms": rtt, "tpot_s": {name: tpot(name, rtt / 1000, rates) for name in [*names, "pipelined"]}}
            for rtt in range(0, 101, 5)
        ],
        "best_lengths": [_best(name, c["link"]["rtt_ms"], rates) for c in links for name in names[1:]],
        "break_even_rtt_s": even, "break_even_interval_s": [even - 0.009, even + 0.012],
        "measured_break_even_rtt_s": even - 0.003,
        "distributed_over_fused_s": base["distributed"]["tpot_s"]["mean"] - base["fused"]["tpot_s"]["mean"],
        "waiting_pays_until_s": None,
        "capacity_gain": theory.capacity_gain(COSTS, LENGTH),
        "target_s_per_token": {"autoregressive": 0.0373, "distributed": 0.0189, "fused": 0.0228},
        "notes": [
            "Component times are from short calibrating requests, acceptance from the measured ones.",
            "Pipelined decoding was not run: its figure is a lower bound (rounds in flight without end).",
        ],
    }  # fmt: skip
    speedup, interval = base["fused"]["speedup_vs_autoregressive"], base["fused"]["speedup_interval"]
    over = base["distributed"]["tpot_s"]["mean"] / base["fused"]["tpot_s"]["mean"]
    decision = {
        "headline": "At 0 ms, use fused: draft and target in one server",
        "sureness": "weak", "reasons": ["step times varied"], "surer": ["on an idle machine"], "brief": "steps varied",
        "ratios": f"On this link (emulated, RTT 0 ms) fused is {over:.2f} times faster than distributed and"
        f" {speedup:.2f}"
        f" times faster than plain decoding; distributed beats plain decoding below {1000 * even:.0f} ms RTT.",
        "architecture": "fused", "speculation_length": LENGTH, "speedup": speedup, "speedup_interval": interval,
        "because": [
            f"Measured speedup over plain decoding: {speedup:.2f}, 95 % interval {interval[0]:.2f} to"
            f" {interval[1]:.2f} over 10 requests (paired by prompt).",
            "Speculation length 3, the measured one, is also the predicted best.",
        ],
        "would_change": ["If the target's host cannot hold the draft: distributed at short round trips."],
    }  # fmt: skip
    return found, decision


def tpot(name: str, rtt: float, rates: list[float], length: int | None = None) -> float:
    """Predicted seconds per token."""
    g = LENGTH if length is None else length
    carried = [*rates, *[rates[-1]] * g][:g]
    if name == "autoregressive" or g == 0:
        return COSTS.plain + OVERHEAD_S
    if name == "pipelined":
        return theory.tpot_pipelined(COSTS, 0.62, rtt + RPC_S)
    if name == "fused":
        return theory.tpot_fused(COSTS, carried, OVERHEAD_S)
    return theory.tpot_stop_and_wait(COSTS, carried, rtt + RPC_S, 0.0, OVERHEAD_S + 0.0035 * (name == "remote_draft"))


def _best(name: str, rtt_ms: float, rates: list[float]) -> JSON:
    by_length = [tpot(name, rtt_ms / 1000, rates, g) for g in range(LONGEST + 1)]
    length = min(range(len(by_length)), key=by_length.__getitem__)
    ratio = 0.0 if name == "fused" else (rtt_ms / 1000 + RPC_S) / COSTS.verify(0)
    closed = theory.best_length_closed_form(0.62, (COSTS.draft + COSTS.verify_slope) / COSTS.verify(0), ratio)
    return {"architecture": name, "rtt_ms": rtt_ms, "length": length, "closed_form": closed,
            "tpot_s": by_length[length], "tpot_s_by_length": by_length}  # fmt: skip


def _costs(name: str) -> JSON:
    drafts, split = name != "autoregressive", name in ("distributed", "remote_draft")
    return {
        "draft_fixed_s": 0.0, "draft_slope_s": COSTS.draft if drafts else 0.0,
        "draft_s_by_length": {str(g): COSTS.draft * g for g in (1, 3)} if drafts else {},
        "verify_fixed_s": COSTS.verify_fixed, "verify_slope_s": COSTS.verify_slope,
        "verify_s_by_positions": {str(n): COSTS.verify(n - 1) for n in ((1, 2, 4) if drafts else (1,))},
        "round_overhead_s": OVERHEAD_S, "rpc_s": RPC_S if split else 0.0, "message_bytes": 92.0 if split else 22.0,
    }  # fmt: skip
