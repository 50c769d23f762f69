"""SYNTHETIC test data in the shape of comparison.json, version 2. Nothing here was measured.

Requests are simulated from a seed with step times and acceptance rates near those of the embedded pair on two cores,
so that a report made of them looks as a real one does.
"""

from __future__ import annotations

import pickle
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache
from typing import Any

from tandem.comparison.measuring.distributions import distribution
from tests.comparison.report.example_theory import theory_and_decision

JSON = dict[str, Any]
ARCHITECTURES = ("autoregressive", "distributed", "fused", "remote_draft")
SERVICES = {
    "autoregressive": "TargetVerifier",
    "distributed": "DraftWorker",
    "fused": "FusedSpeculativeServer",
    "remote_draft": "FusedSpeculativeServer",
}
SPLIT = ("distributed", "remote_draft")
WORKLOADS = {  # conditional acceptance by position
    "counting_and_lists": (0.72, 0.91, 0.86),
    "code": (0.52, 0.66, 0.76),
    "extraction": (0.60, 0.69, 0.74),
    "chat": (0.40, 0.52, 0.57),
    "prose": (0.48, 0.55, 0.51),
}
PROMPTS = [(f"{kind}/{name}", kind) for kind in WORKLOADS for name in ("first", "second")]
LOADS = [{"requests": len(PROMPTS), "concurrency": users, "rate": None} for users in (1, 4, 8)]
LOADS += [{"requests": len(PROMPTS), "concurrency": None, "rate": rate} for rate in (0.5, 2.0)]
RTTS_MS = (0.0, 20.0, 50.0, 100.0)
LENGTH, TOKENS, SEED = 3, 64, 20261121
PLAIN_S, DRAFT_S, VERIFY_S, RPC_S, OVERHEAD_S = 0.0373, 0.0027, 0.0386, 0.0014, 0.0012
MODEL = {
    "model_name": "SmolLM2-135M-Instruct", "weights_revision": "sha256:0123", "dtype": "bfloat16", "device": "cpu",
    "backend": "torch", "draft_name": "ngram+embedded_draft", "plain_width": 1, "max_speculation_length": LENGTH,
}  # fmt: skip


def example() -> JSON:
    """Four architectures, four emulated round trips, three temperatures under two rules, a divergence, a failure."""
    found: JSON = pickle.loads(_example())  # a tenth of the time that making it takes
    return found


@cache
def _example() -> bytes:
    rng = random.Random(SEED)
    greedy = sampling(0.0)
    conditions = [_condition("base", "base", rtt_link(0.0), greedy)]
    conditions += [_condition(f"RTT {rtt:g} ms", "link", rtt_link(rtt), greedy) for rtt in RTTS_MS[1:]]
    for temperature in (0.4, 0.8, 1.2):
        for rule in ("agreement", "rejection"):
            name = f"temperature {temperature:g}, {rule}"
            conditions.append(_condition(name, "sampling", rtt_link(0.0), sampling(temperature), rule))
    for load in LOADS:
        name = f"concurrency {load['concurrency']}" if load["concurrency"] else f"rate {load['rate']:g}/s"
        conditions.append({**_condition(name, "load", rtt_link(0.0), sampling(0.0)), "load": load})
    records = [r for condition in conditions for r in _requests(condition, ARCHITECTURES, rng)]
    failed = next(r for r in records if (r["condition"], r["architecture"]) == ("RTT 100 ms", "remote_draft"))
    failed.update(dict.fromkeys(MEASURED), error={"code": "DEADLINE_EXCEEDED", "message": "no reply in 300 s"})
    _summarize(conditions, records)
    identical = conditions[0]["architectures"]["remote_draft"]["identical_to_autoregressive"]
    identical["count"] -= 1
    identical["divergences"].append(
        {"prompt": "prose/second", "run": 0, "position": 41, "token": 260, "autoregressive_token": 284,
         "logit_gap": 0.0625}
    )  # fmt: skip
    found = {"schema_version": 2, **_setting(ARCHITECTURES, conditions), "records": records}
    found["link"] = "emulated (RTT 0 ms; RTT 20 ms; RTT 50 ms; RTT 100 ms)"
    found["remarks"] = ["synthetic: test data, nothing here was measured"]
    found["theory"], found["decision"] = theory_and_decision(conditions)
    found["under_load"] = _under_load([c for c in conditions if c["varies"] == "load"])
    found |= _doubts([c for c in conditions if c["varies"] in ("base", "link")])
    return pickle.dumps(found)


def _doubts(links: list[JSON]) -> JSON:
    """Verdicts of every sureness, a statement of each kind, and a caveat."""
    verdicts = []
    for condition, sureness in zip(links, ("sure", "sure", "weak", "noise"), strict=True):
        rtt = condition["link"]["rtt_ms"]
        brief = "" if sureness == "sure" else "this machine was busy"
        reason = "10 answers to 10 prompts" if not brief else "2.4 threads of other programs wanted each core"
        surer = ["on an idle machine"] if brief else []
        doubt = {"sureness": sureness, "reasons": [reason], "surer": surer, "brief": brief}
        headline = f"At {rtt:g} ms, use fused: draft and target in one server"
        line = f"RTT {rtt:g} ms: fused, 1.80 times as fast as plain decoding ({sureness})"
        if sureness == "noise":
            headline = f"At {rtt:g} ms, nothing can be decided: {doubt['brief']}"
            line = f"RTT {rtt:g} ms: not decided ({reason})"
        verdicts.append({"condition": condition["name"], "architecture": "fused", "headline": headline, "line": line,
                         "ratio": 1.8, "interval": [1.6, 2.0], **doubt})  # fmt: skip
    sure = {"sureness": "sure", "reasons": ["counted, not timed"], "surer": [], "brief": ""}
    unsure = {"sureness": "weak", "reasons": ["it is predicted, not measured"], "brief": "it is a prediction",
              "surer": ["in a comparison under that condition"]}  # fmt: skip
    statements = [
        {"about": "speed", "condition": "base", "text": "fused is 1.80 times as fast as plain decoding", "ratio": 1.8,
         "interval": [1.6, 2.0], **{key: verdicts[0][key] for key in sure}},
        {"about": "tokens", "condition": "base", "text": "29 of 30 outputs have the tokens of plain decoding",
         "ratio": None, "interval": None, **sure},
        {"about": "prediction", "condition": "base", "text": "Another link: distributed at short round trips.",
         "ratio": None, "interval": None, **unsure},
    ]  # fmt: skip
    return {"verdicts": verdicts, "statements": statements, "caveats": ["synthetic: fused ran already at 127.0.0.1:1."]}


def _under_load(conditions: list[JSON]) -> JSON:
    """Throughputs as if requests waited for each other: more at once, and each one slower."""
    points = []
    for condition in conditions:
        load, figures = condition["load"], {}
        users = load["concurrency"] or 3
        for name, of in condition["architectures"].items():
            slower = 1 + 0.35 * (users - 1)
            for key in ("ttft_s", "tpot_s", "end_to_end_latency_s"):
                of[key] = {statistic: value * slower for statistic, value in of[key].items()}
            seconds = load["requests"] * of["end_to_end_latency_s"]["mean"] / users
            figures[name] = {
                "num_requests_started": load["requests"], "num_completed_requests": load["requests"],
                "number_errors": 0, "error_rate": 0.0, "error_code_frequency": {}, "seconds": seconds,
                "num_completed_requests_per_minute": 60 * load["requests"] / seconds,
                "mean_output_throughput_token_per_s": TOKENS * load["requests"] / seconds,
            }  # fmt: skip
        best = {"architecture": "fused", "throughput_ratio": 1.8, "close": [], "sentence": f"{users}: fused."}
        points.append({"condition": condition["name"], **load, "best": best, "architectures": figures})
    return {"headline": "Under load: fused at every load.", "points": points}


def minimal() -> JSON:
    """One condition on a direct link, two architectures, no theory, no decision."""
    rng = random.Random(SEED)
    link = {"kind": "direct", "rtt_ms": 0, "bandwidth_mbps": None, "direct_round_trip_s": None, "round_trip_s": None,
            "added_s": None}  # fmt: skip
    conditions = [_condition("base", "base", link, sampling(0.0))]
    records = _requests(conditions[0], ("distributed", "fused"), rng)
    _summarize(conditions, records)
    found = {"schema_version": 2, **_setting(("distributed", "fused"), conditions), "records": records}
    return {**found, "baseline": None, "theory": None, "decision": None}


def sampling(temperature: float) -> JSON:
    return {"temperature": temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 7 if temperature else 0}


def rtt_link(rtt_ms: float) -> JSON:
    direct, added = 0.000055, 0.00021 + rtt_ms * 2e-6
    return {"kind": "emulated", "rtt_ms": rtt_ms, "bandwidth_mbps": None, "direct_round_trip_s": direct,
            "round_trip_s": direct + rtt_ms / 1000 + added, "added_s": added}  # fmt: skip


def _condition(name: str, varies: str, link: JSON, drawn: JSON, rule: str = "agreement") -> JSON:
    return {"name": name, "varies": varies, "link": link, "sampling": drawn, "rule": rule, "architectures": {}}


def _setting(names: Sequence[str], conditions: list[JSON]) -> JSON:
    prompts = [{"name": name, "kind": kind, "text": f"Synthetic: {name}", "chat": False} for name, kind in PROMPTS]
    return {
        "started_at": "2026-11-21T11:09:35+00:00",
        "settings": {
            "prompts": prompts, "architectures": list(names), "num_runs": 1, "max_new_tokens": TOKENS,
            "speculation_length": LENGTH, "sampling": sampling(0.0), "sequence_length": 512, "batch": None,
            "connect": {}, "dtype": "auto", "output_dir": "results/example", "timeout_s": 300.0,
        },
        "link": "loopback",
        "machine": {"system": "Linux 6.18", "architecture": "x86_64", "processor": "Synthetic CPU", "usable_cores": 2,
                    "memory_bytes": 25_276_502_016},
        "versions": {"python": "3.11.7", "packages": {"torch": "2.13.0", "numpy": "2.4.6"}, "git_commit": None},
        "baseline": {"architecture": "autoregressive", "plain_width": 1},
        "remarks": [], "warm_up_failures": {},
        "servers": {
            name: {"service": SERVICES[name], "address": f"127.0.0.1:{50051 + i}", "started_here": True,
                   "model": MODEL | ({"draft_name": ""} if name == "autoregressive" else {})}
            for i, name in enumerate(names)
        },
        "conditions": conditions,
    }  # fmt: skip


MEASURED = (
    "output_token_ids", "ttft_s", "tpot_s", "end_to_end_latency_s", "chunk_tokens", "chunk_gaps_s", "seconds_by_cause",
    "output_tokens", "drafted_per_position", "accepted_per_position", "bytes_up", "bytes_down",
)  # fmt: skip


def _requests(condition: JSON, names: Sequence[str], rng: random.Random) -> list[JSON]:
    return [_request(condition, name, prompt, kind, rng) for prompt, kind in PROMPTS for name in names]


def _request(condition: JSON, name: str, prompt: str, kind: str, rng: random.Random) -> JSON:
    """One request, round by round. Acceptance is of the prompt's own seed, the same for every placement."""
    rtt = condition["link"]["rtt_ms"] / 1000
    heat, rejection = condition["sampling"]["temperature"], condition["rule"] == "rejection"
    luck = random.Random(f"{prompt} {heat} {condition['rule']}")
    ease = 1 - 0.28 * heat * (0.55 if rejection else 1.0) + luck.uniform(-0.06, 0.06)
    plain, length = name == "autoregressive", 0 if name == "autoregressive" else LENGTH
    split, pace = name in SPLIT, rng.gauss(1, 0.02)
    chunks, gaps, drafted, accepted = [], [], [0] * length, [0] * length
    spent = dict.fromkeys(("draft", "verify", "queue", "network", "prefill", "other"), 0.0)
    while sum(chunks) < TOKENS:
        good = 0
        while good < length and luck.random() < min(0.98, WORKLOADS[kind][good] * ease):
            good += 1
        drafted, accepted = [d + 1 for d in drafted], [a + (i < good) for i, a in enumerate(accepted)]
        chunks.append(min(good + 1, TOKENS - sum(chunks)))
        step = {
            "draft": 0.0 if plain else rng.gauss(1, 0.08) * (DRAFT_S * LENGTH + (0.001 if rejection else 0)),
            "verify": rng.gauss(1, 0.05) * (PLAIN_S if plain else VERIFY_S) * pace,
            "queue": 0.0005,
            "network": (rtt + RPC_S + (0.0004 if rejection else 0)) * rng.gauss(1, 0.02) if split else 0.0,
            "other": OVERHEAD_S * rng.gauss(1, 0.1) + (0.0035 if name == "remote_draft" else 0.0),
        }
        spent = {cause: seconds + step.get(cause, 0.0) for cause, seconds in spent.items()}
        gaps.append(sum(step.values()))
    spent["prefill"] = luck.uniform(0.07, 0.18)
    spent["other"] += rtt
    ttft = spent["prefill"] + gaps[0] + rtt
    total, rounds = ttft + sum(gaps[1:]), len(chunks)
    width = 17 + (LENGTH * 190 * heat if rejection else 0)
    return {
        "condition": condition["name"], "architecture": name, "prompt": prompt, "workload": kind, "run": 0,
        "error": None, "output_token_ids": [luck.randrange(49152) for _ in range(TOKENS)], "ttft_s": ttft,
        "tpot_s": (total - ttft) / (TOKENS - 1), "end_to_end_latency_s": total, "chunk_tokens": chunks,
        "chunk_gaps_s": gaps[1:], "seconds_by_cause": spent, "output_tokens": TOKENS,
        "drafted_per_position": drafted, "accepted_per_position": accepted,
        "bytes_up": round(120 + rounds * width * 2) if split else 180, "bytes_down": rounds * (36 if split else 18),
    }  # fmt: skip


def _summarize(conditions: list[JSON], records: list[JSON]) -> None:
    for condition in conditions:
        of = [r for r in records if r["condition"] == condition["name"]]
        names = list(dict.fromkeys(r["architecture"] for r in of))
        plain = {r["prompt"]: r for r in of if r["architecture"] == "autoregressive"}
        for name in names:
            own = [r for r in of if r["architecture"] == name]
            claimed = bool(plain) and condition["rule"] == "agreement"
            condition["architectures"][name] = _architecture(own, plain, claimed)


def _architecture(own: list[JSON], plain: JSON, claimed: bool) -> JSON:
    done = [r for r in own if not r["error"]]
    tokens = sum(r["output_tokens"] for r in done)

    def of(value: Callable[[JSON], float]) -> JSON:
        return asdict(distribution(value(r) for r in done))

    return {
        "requests": len(own), "failed": len(own) - len(done),
        **_shared(done, plain, claimed),
        "ttft_s": of(lambda r: r["ttft_s"]),
        "tpot_interval": _interval([r["tpot_s"] for r in done]),
        "inter_token_latency_s": of(lambda r: r["end_to_end_latency_s"] / TOKENS),
        "end_to_end_latency_s": of(lambda r: r["end_to_end_latency_s"]),
        "request_output_throughput_token_per_s": of(lambda r: TOKENS / r["end_to_end_latency_s"]),
        "number_input_tokens": of(lambda r: 50), "number_output_tokens": of(lambda r: r["output_tokens"]),
        "chunk_gap_s": asdict(distribution(gap for r in done for gap in r["chunk_gaps_s"])),
        "tokens_per_chunk": asdict(distribution(float(n) for r in done for n in r["chunk_tokens"])),
        "output_throughput_token_per_s": tokens / sum(r["end_to_end_latency_s"] for r in done),
        "bytes_up_per_token": sum(r["bytes_up"] for r in done) / tokens,
        "bytes_down_per_token": sum(r["bytes_down"] for r in done) / tokens,
        "milliseconds_per_token": {
            cause: 1000 * sum(r["seconds_by_cause"][cause] for r in done) / tokens
            for cause in ("draft", "verify", "queue", "network", "prefill", "other")
        },
        "acceptance_interval": _interval(
            [sum(r["accepted_per_position"]) / d for r in done if (d := sum(r["drafted_per_position"]))]
        ),
        "requests_whose_other_seconds_were_clamped_at_0": 0,
        "workloads": {
            kind: _shared([r for r in done if r["workload"] == kind], plain, claimed) for kind in WORKLOADS
        },
    }  # fmt: skip


def _shared(done: list[JSON], plain: JSON, claimed: bool) -> JSON:
    """What an architecture and one of its workloads both say."""
    rounds = sum(len(r["chunk_tokens"]) for r in done)
    drafted = [sum(column) for column in zip(*(r["drafted_per_position"] for r in done), strict=True)]
    accepted = [sum(column) for column in zip(*(r["accepted_per_position"] for r in done), strict=True)]
    ratios = [plain[r["prompt"]]["tpot_s"] / r["tpot_s"] for r in done if r["prompt"] in plain]
    reached = [*drafted[:1], *accepted]
    drafters = {"model": sum(drafted) - sum(drafted) // 6, "ngram": sum(drafted) // 6} if sum(drafted) else {}
    return {
        "rounds": rounds, "drafted": sum(drafted), "accepted": sum(accepted),
        "acceptance_rate": sum(accepted) / sum(drafted) if sum(drafted) else None,
        "propose_rate": drafted[0] / rounds if drafted else 0.0,
        "mean_acceptance_length": sum(r["output_tokens"] for r in done) / rounds,
        "acceptance_by_position": [a / d for a, d in zip(accepted, drafted, strict=True)],
        "conditional_acceptance_by_position": [a / d for a, d in zip(accepted, reached, strict=False)],
        "drafted_by": drafters, "accepted_by": {who: count // 3 for who, count in drafters.items()},
        "tpot_s": asdict(distribution(r["tpot_s"] for r in done)),
        "speedup_vs_autoregressive": statistics.fmean(ratios) if ratios else None,
        "speedup_interval": _interval(ratios),
        "end_to_end_speedup_vs_autoregressive": statistics.fmean(ratios) * 0.95 if ratios else None,
        "speedup_pairs": len(ratios),
        "identical_to_autoregressive":
            {"count": len(done), "total": len(done), "divergences": []} if claimed else None,
    }  # fmt: skip


def _interval(values: Sequence[float]) -> list[float] | None:
    """Two standard errors: plausible, which is all that is asked of test data."""
    if len(values) < 2:
        return None
    mean, error = statistics.fmean(values), statistics.stdev(values) / len(values) ** 0.5
    return [mean - 2 * error, mean + 2 * error]
