"""Metrics read from the server's state at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

Samples = Iterable[tuple[Mapping[str, str], float]]
Families = type[GaugeMetricFamily] | type[CounterMetricFamily]


@dataclass(slots=True)
class _State:
    family: Families
    help: str
    labels: Sequence[str]
    samples: list[Callable[[], Samples]]


class ScrapedMetrics(Collector):
    """Scrapes run on another thread: each `read` must be atomic."""

    def __init__(self) -> None:
        self._states: dict[str, _State] = {}

    def gauge(self, name: str, help_text: str, labels: Mapping[str, str], read: Callable[[], float]) -> None:
        self.gauges(name, help_text, tuple(labels), lambda: [(labels, read())])

    def counter(self, name: str, help_text: str, labels: Mapping[str, str], read: Callable[[], float]) -> None:
        """Adds a counter; `name` without "_total"."""
        self.counters(name, help_text, tuple(labels), lambda: [(labels, read())])

    def gauges(self, name: str, help_text: str, labels: Sequence[str], read: Callable[[], Samples]) -> None:
        self._add(GaugeMetricFamily, name, help_text, labels, read)

    def counters(self, name: str, help_text: str, labels: Sequence[str], read: Callable[[], Samples]) -> None:
        self._add(CounterMetricFamily, name, help_text, labels, read)

    def _add(
        self, family: Families, name: str, help_text: str, labels: Sequence[str], read: Callable[[], Samples]
    ) -> None:
        self._states.setdefault(name, _State(family, help_text, labels, [])).samples.append(read)

    def collect(self) -> Iterable[Metric]:
        for name, state in list(self._states.items()):
            family = state.family(name, state.help, labels=state.labels)
            for read in state.samples:
                for labels, value in read():
                    family.add_metric([labels[each] for each in state.labels], value)
            yield family
