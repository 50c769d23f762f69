"""Metrics of rehearsals: models paced to another device's step times."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from tandem.services.observability.scraped_metrics import ScrapedMetrics
from tandem.speculation.types import Rehearsal


def watch_rehearsals(states: ScrapedMetrics, rehearsals: Sequence[Rehearsal]) -> None:
    for each in rehearsals:
        said = {"of": each.part, "name": each.name, "device": each.device, "source": each.source}
        states.gauge("tandem:rehearsal_info", "Whose step times are rehearsed; always 1.", said, lambda: 1.0)
        of = {"of": each.part}
        states.counter("tandem:rehearsed_steps", "Steps that took another device's time.", of, partial(_read, each))
        late = partial(_read, each, "late_steps")
        states.counter("tandem:rehearsed_late_steps", "Steps that ended later than that device's would.", of, late)


def _read(rehearsal: Rehearsal, count: str = "steps") -> float:
    return float(getattr(rehearsal, count))
