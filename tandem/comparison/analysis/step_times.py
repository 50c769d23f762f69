"""Turns measurements into a file of step times for rehearsals (docs/comparison.md)."""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import replace

from tandem.comparison.measuring.architectures import AUTOREGRESSIVE, WIDTH_1
from tandem.comparison.measuring.record_log import RunData
from tandem.comparison.measuring.records import Measurement
from tandem.host.device_times import DeviceTimes, StepTime, StepTimes


def step_times(measured: RunData) -> DeviceTimes | None:
    """Returns the servers' step times; None without any, or for a rehearsal: those are in a file already."""
    models = [endpoint.model for endpoint in measured.endpoints]
    if not models or any(model.rehearsals for model in models) or measured.config.connect:
        return None
    target = _target(measured)
    draft = _draft(measured)
    if target is None:
        return None
    drafts = next((model.draft_name for model in models if model.draft_name), "")
    return DeviceTimes(
        name="measured",
        device=f"{measured.machine.processor}, {measured.machine.usable_cores} cores, with {models[0].model_name}",
        source=f"tandem compare, {measured.started_at}, medians over rows measured one at a time",
        target=replace(target, model=models[0].model_name),
        draft=draft and replace(draft, model=drafts),
    )


def _target(measured: RunData) -> StepTimes | None:
    """Medians of verification seconds by tokens fed."""
    seconds: defaultdict[int, list[float]] = defaultdict(list)
    plain = [r.measurement for r in measured.records if r.architecture in (AUTOREGRESSIVE.name, WIDTH_1.name)]
    for one in [*filter(None, plain), *_calibrated(measured)]:
        if one.rounds and one.seconds_by_cause.verify > 0:
            seconds[round(1 + one.drafted / one.rounds)].append(one.seconds_by_cause.verify / one.rounds)
    return _times({width: statistics.median(values) for width, values in seconds.items()})


def _draft(measured: RunData) -> StepTimes | None:
    """The median seconds of one draft token of a model; copies cost almost nothing."""
    known: list[float] = []
    for one in _calibrated(measured):
        by_models = sum(count for proposer, count in one.drafted_by.items() if proposer != "ngram")
        if by_models and one.seconds_by_cause.draft:
            known.append(one.seconds_by_cause.draft / by_models)
    return _times({1: statistics.median(known)}) if known else None


def _calibrated(measured: RunData) -> list[Measurement]:
    return [one for by_length in measured.calibrations.values() for found in by_length.values() for one in found]


def _times(seconds: dict[int, float]) -> StepTimes | None:
    points = tuple(StepTime(round(1000 * value, 4), width) for width, value in sorted(seconds.items()) if value > 5e-8)
    return StepTimes(points) if points else None
