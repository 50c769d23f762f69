"""The bounds of benchmarks/fast.py."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.crowds import Load
from benchmarks.figures import Sample, decoding, end_to_end, speedup
from benchmarks.formats import AUTOREGRESSIVE, BASE, FORMATS, FUSED, LLAMA, is_ours, ours
from benchmarks.prompt_speed import PromptSpeed
from benchmarks.prompt_speed import speedup as prompt_speedup

MANY = 8
# over the best of a build in the same width: llama.cpp, and any other that --llama-server names
PLAIN = {BASE: (1.1, 1.1), "int8": (1.3, 1.3), "as-stored": (1.6, 1.3)}
FUSED_BEST = (2.5, 2.1)
OF_LIMIT = {BASE: 0.85, "int8": 0.75}
PROMPTS, PLAIN_MANY, FUSED_MANY, MANY_BEST = 2.0, 3.5, 2.5, 2.0


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


def plain_bars(
    samples: Sequence[Sample], shares: Mapping[str, float | None], builds: Sequence[str] = (LLAMA,)
) -> list[Bar]:
    """Returns the bars on plain decoding by format. `shares`: of the bandwidth limit, by weights."""
    beside = [
        _faster(samples, form.plain, fastest(samples, form.of(build)) or form.of(build)[0], _of(build, bounds))
        for build in builds
        for form, bounds in zip(FORMATS, PLAIN.values(), strict=True)
    ]
    limits = [
        Bar(f"{ours(AUTOREGRESSIVE, weights)}, share of the bandwidth limit", shares.get(weights), bound)
        for weights, bound in OF_LIMIT.items()
    ]
    return beside + limits


def fused_bars(samples: Sequence[Sample], builds: Sequence[str] = (LLAMA,)) -> list[Bar]:
    """Returns the bars on our fastest fused format against each build's fastest, speculating or not."""
    mine = fastest(samples, [form.fused for form in FORMATS]) or FUSED
    return [
        _faster(samples, mine, best_of(samples, build) or f"{build}'s fastest", _of(build, FUSED_BEST))
        for build in builds
    ]


def best_of(samples: Sequence[Sample], build: str) -> str | None:
    """Returns the fastest of a build's contenders in any format, with a draft or without."""
    return fastest(samples, [name for form in FORMATS for draft in (False, True) for name in form.of(build, draft)])


def _of(build: str, bounds: tuple[float, float]) -> float:
    return bounds[build != LLAMA]


def fastest(samples: Iterable[Sample], names: Iterable[str]) -> str | None:
    """Returns the contender with the least median decoding time per token."""
    times: dict[str, list[float]] = {name: [] for name in sorted(names)}
    for sample in samples:
        ms = decoding(sample)
        if sample.contender in times and ms is not None:
            times[sample.contender].append(ms)
    return min((name for name in times if times[name]), key=lambda name: statistics.median(times[name]), default=None)


def prompt_bars(speeds: Sequence[PromptSpeed], lengths: Sequence[int], builds: Sequence[str] = (LLAMA,)) -> list[Bar]:
    """Returns the bars on prompt processing, over each build's best of the same width, by format and length."""
    found: list[Bar] = []
    for build, form, n in itertools.product(builds, FORMATS, lengths):
        theirs = best_prompts(speeds, form.of(build), n)
        value = prompt_speedup(speeds, form.plain, theirs.contender, n) if theirs else None
        name = theirs.contender if theirs else form.of(build)[0]
        found.append(Bar(f"{form.plain} / {name}, prompts of {n} tokens", value, PROMPTS))
    return found


def best_prompts(speeds: Sequence[PromptSpeed], names: Sequence[str], tokens: int) -> PromptSpeed | None:
    """Returns the fastest of these contenders with prompts of this length."""
    known = [speed for speed in speeds if speed.contender in names and speed.tokens == tokens]
    return max(known, key=lambda speed: speed.rate, default=None)


def many_bars(loads: Sequence[Load]) -> list[Bar]:
    """Returns the bars on concurrent requests: ours over a single request, and fused over the best peer."""
    rates = {(load.contender, load.concurrency): load.rate for load in loads}
    mine = _most(rates, {form.fused for form in FORMATS}.__contains__) or FUSED
    plain = _most(rates, {form.plain for form in FORMATS}.__contains__) or AUTOREGRESSIVE
    peer = _most(rates, lambda name: not is_ours(name))

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
