"""Gathers what a statement about times rests on, from the records of a run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from tandem.comparison.analysis.bootstrap import Interval
from tandem.comparison.analysis.caveats import unlike
from tandem.comparison.analysis.doubt import EARLY_TOKENS, Evidence
from tandem.comparison.analysis.findings import Theory
from tandem.comparison.analysis.metrics import completed
from tandem.comparison.measuring.architectures import NEVER_WAITING, PIPELINED, PLAIN
from tandem.comparison.measuring.distributions import ratio
from tandem.comparison.measuring.machine_load import MachineLoad
from tandem.comparison.measuring.record_log import RunData
from tandem.comparison.measuring.records import Record

NOT_COSTED = (PIPELINED.name, NEVER_WAITING.name)
"""Their predictions are a bound, or assume the costs of other rounds: that one misses says nothing of the machine."""
LEAST_STEPS = 4
"""The least number of requests whose step times are compared."""


def between(
    measured: RunData, condition: str, names: tuple[str, str], interval: Interval | None, theory: Theory | None
) -> Evidence:
    """Returns the evidence of how two architectures compare under a condition. `interval`: of the ratio."""
    under = [record for record in measured.records if record.condition == condition]
    own = [[record for record in under if record.architecture == name] for name in names]
    answered = [{(r.prompt, r.run) for r in of if r.measurement and r.measurement.tpot_s is not None} for of in own]
    both = answered[0] & answered[1]
    steps = _steps(under, names)
    found = beside([record for of in own for record in of], measured.machine.usable_cores)
    return replace(
        found,
        prompts=len({prompt for prompt, _ in both}),
        answers=len(both),
        timed_tokens=min(sum(m.output_tokens - 1 for m in completed(of)) for of in own),
        interval=interval,
        steps_vary=spread(steps),
        steps_drift=_drift(steps),
        missed=missed(theory, condition, names),
        apart=unlike(measured.endpoints, *names),
    )


def beside(records: Sequence[Record], cores: int) -> Evidence:
    """Returns how busy the machine was beside these requests, and how many of them ended early."""
    tokens = [m.output_tokens for m in completed(records)]
    early = ratio(sum(count < EARLY_TOKENS for count in tokens), len(tokens))
    return replace(beside_loads([r.machine_load for r in records if r.machine_load], cores), early=early)


def beside_loads(loads: Sequence[MachineLoad], cores: int) -> Evidence:
    """Returns how busy the machine was, on average."""
    return Evidence(
        others=_mean(loads, lambda load: load.others),
        waiting=_mean(loads, lambda load: load.waiting, cores),
        steal=_mean(loads, lambda load: load.steal),
        load_average=_mean(loads, lambda load: load.load_average, cores),
    )


def _mean(loads: Iterable[MachineLoad], of: Callable[[MachineLoad], float | None], each: int = 1) -> float | None:
    known = [value for load in loads if (value := of(load)) is not None]
    return statistics.fmean(known) / max(1, each) if known else None


def missed(theory: Theory | None, condition: str | None = None, names: Sequence[str] = ()) -> float | None:
    """Returns the largest factor by which predictions are off, of these architectures and condition; None: of all."""
    return max(
        (
            max(share, 1 / share)
            for p in (theory.predictions if theory else ())
            if condition in (None, p.condition) and p.architecture not in NOT_COSTED
            if not names or p.architecture in names
            if p.error is not None and (share := 1 + p.error) > 0
        ),
        default=None,
    )


def _steps(records: Iterable[Record], names: Sequence[str]) -> list[float]:
    """Returns the seconds of a target's step by request, in the order of measurement: plain decoding's if there is any.

    Steps of other architectures depend on what was drafted; each is taken relative to the median of its own.
    """
    by_name: dict[str, list[tuple[int, float]]] = {}
    for i, record in enumerate(records):
        m = record.measurement
        if m and m.rounds and (seconds := m.seconds_by_cause.verify / m.rounds) > 0:
            by_name.setdefault(record.architecture, []).append((i, seconds))
    plain = next((by_name[name] for name in reversed(PLAIN) if name in by_name), None)
    if plain:
        return [seconds for _, seconds in plain]
    shares = []
    for name in names:
        of = by_name.get(name, [])
        shares += [(i, seconds / statistics.median(s for _, s in of)) for i, seconds in of]
    return [share for _, share in sorted(shares)]


def spread(steps: Sequence[float]) -> float | None:
    """Returns the slowest tenth over the fastest tenth; None for too few steps."""
    if len(steps) < LEAST_STEPS:
        return None
    low, *_, high = statistics.quantiles(steps, n=10, method="inclusive")
    return ratio(high, low)


def _drift(steps: Sequence[float]) -> float | None:
    if len(steps) < LEAST_STEPS:
        return None
    half = len(steps) // 2
    share = ratio(statistics.median(steps[half:]), statistics.median(steps[:half]))
    return max(share, 1 / share) if share else None
