"""The bounds of benchmarks/fast.py."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.figures import Sample, decoding, end_to_end, speedup
from benchmarks.formats import AUTOREGRESSIVE, BASE, FORMATS, FUSED, LLAMA, PEERS, ours
from benchmarks.load import Load
from benchmarks.prompt_speed import PromptSpeed
from benchmarks.prompt_speed import speedup as prompt_speedup

MANY = 8
PLAIN = {BASE: 1.1, "int8": 1.3, "as-stored": 2.0}
OF_LIMIT = {BASE: 0.85, "int8": 0.75}
FUSED_BEST, PROMPTS, PLAIN_MANY, FUSED_MANY, MANY_BEST = 3.0, 2.0, 3.0, 2.5, 2.0


@dataclass(frozen=True, slots=True)
class Bar:
    """A figure with its bound."""

    title: str
    value: float | None  # None: not measured
    bound: float
    at_most: bool = False
    also: float | None = None  # the same, end to end

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "not measured"
        met = self.value <= self.bound if self.at_most else self.value >= self.bound
        return "met" if met else "missed"


def plain_bars(samples: Sequence[Sample], shares: Mapping[str, float | None]) -> list[Bar]:
    """Returns the bars on plain decoding by format. `shares`: of the bandwidth limit, by weights."""
    beside = [_faster(samples, form.plain, form.llama, PLAIN[form.weights]) for form in FORMATS]
    limits = [
        Bar(f"{ours(AUTOREGRESSIVE, weights)}, share of the bandwidth limit", shares.get(weights), bound)
        for weights, bound in OF_LIMIT.items()
    ]
    return beside + limits


def fused_bar(samples: Sequence[Sample]) -> Bar:
    """Returns the bar on our fastest fused format against llama.cpp's fastest, speculating or not."""
    mine = fastest(samples, [form.fused for form in FORMATS])
    theirs = fastest(samples, {s.contender for s in samples if s.contender.startswith(LLAMA)})
    return _faster(samples, mine or FUSED, theirs or f"{LLAMA}'s fastest", FUSED_BEST)


def fastest(samples: Iterable[Sample], names: Iterable[str]) -> str | None:
    """Returns the contender with the least median decoding time per token."""
    times: dict[str, list[float]] = {name: [] for name in sorted(names)}
    for sample in samples:
        ms = decoding(sample)
        if sample.contender in times and ms is not None:
            times[sample.contender].append(ms)
    return min((name for name in times if times[name]), key=lambda name: statistics.median(times[name]), default=None)


def prompt_bars(speeds: Sequence[PromptSpeed], lengths: Sequence[int]) -> list[Bar]:
    """Returns the bars on prompt processing, by format and length."""
    return [
        Bar(f"{form.plain} / {form.llama}, prompts of {n} tokens", value, PROMPTS)
        for form in FORMATS
        for n in lengths
        for value in [prompt_speedup(speeds, form.plain, form.llama, n)]
    ]


def many_bars(loads: Sequence[Load]) -> list[Bar]:
    """Returns the bars on concurrent requests: ours over a single request, and fused over the best peer."""
    rates = {(load.contender, load.concurrency): load.rate for load in loads}
    mine = _most(rates, {form.fused for form in FORMATS}.__contains__) or FUSED
    plain = _most(rates, {form.plain for form in FORMATS}.__contains__) or AUTOREGRESSIVE
    peer = _most(rates, lambda name: name.startswith(PEERS))

    def over(many: str, contender: str, concurrency: int) -> float | None:
        at_once, by = rates.get((many, MANY)), rates.get((contender, concurrency))
        return at_once / by if at_once and by else None

    best = over(mine, peer, MANY) if peer else None
    return [
        Bar(f"{plain}, {MANY} requests at once / 1", over(plain, plain, 1), PLAIN_MANY),
        Bar(f"{mine}, {MANY} requests at once / 1", over(mine, mine, 1), FUSED_MANY),
        Bar(f"{mine} / {peer or 'the best peer'}, {MANY} requests at once", best, MANY_BEST),
    ]


def _most(rates: Mapping[tuple[str, int], float], wanted: Callable[[str], bool]) -> str | None:
    found = {name: rate for (name, many), rate in rates.items() if many == MANY and wanted(name)}
    return max(found, key=lambda name: found[name], default=None)


def _faster(samples: Sequence[Sample], mine: str, theirs: str, bound: float) -> Bar:
    value, also = (speedup(samples, mine, theirs, figure) for figure in (decoding, end_to_end))
    return Bar(f"{mine} / {theirs}", value, bound, also=also)
