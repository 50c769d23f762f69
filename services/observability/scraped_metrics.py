"""Metrics read from the server's state when scraped, which cost nothing in between."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

Families = type[GaugeMetricFamily] | type[CounterMetricFamily]


@dataclass(slots=True)
class _State:
    family: Families
    help: str
    samples: list[tuple[Mapping[str, str], Callable[[], float]]]


class ScrapedMetrics(Collector):
    """Metric names and functions that read their values. Scrapes run on another thread: each read must be atomic."""

    def __init__(self) -> None:
        self._states: dict[str, _State] = {}

    def gauge(self, name: str, help_text: str, labels: Mapping[str, str], read: Callable[[], float]) -> None:
        self._add(GaugeMetricFamily, name, help_text, labels, read)

    def counter(self, name: str, help_text: str, labels: Mapping[str, str], read: Callable[[], float]) -> None:
        """Adds a counter; `name` is without "_total"."""
        self._add(CounterMetricFamily, name, help_text, labels, read)

    def _add(
        self, family: Families, name: str, help_text: str, labels: Mapping[str, str], read: Callable[[], float]
    ) -> None:
        state = self._states.setdefault(name, _State(family, help_text, []))
        state.samples.append((labels, read))

    def collect(self) -> Iterable[Metric]:
        for name, state in list(self._states.items()):
            names = list(state.samples[0][0])
            family = state.family(name, state.help, labels=names)
            for labels, read in state.samples:
                family.add_metric([labels[each] for each in names], read())
            yield family
