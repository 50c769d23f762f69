"""The drafter's Prometheus counters; vLLM's /metrics runs in another process."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

log = logging.getLogger("tandem.vllm")

_COUNTERS = {
    "steps": ("Steps of the engine that asked for drafts.", ()),
    "rows": ("Rows of these steps, by where their draft came from (arrived, late, none).", ("source",)),
    "draft_tokens": ("Draft tokens given to the engine.", ("source",)),
    "accepted_tokens": ("Draft tokens that the engine accepted.", ("source",)),
    "wait_seconds": ("Seconds that steps waited for drafts.", ()),
    "late_steps": ("Steps whose budget ended before every draft that they waited for had come.", ()),
    "errors": ("Steps that went undrafted because of a mistake of the drafter itself.", ()),
}
_OF_WORKERS = {
    "failures": ("Calls that a worker failed.", "counter"),
    "up": ("Whether calls are made to a worker (1), or it has failed and is only tried now and then (0).", "gauge"),
    "sessions": ("Rows for which a worker drafts.", "gauge"),
}


class DrafterCounts:
    """Counters by name and label; the engine's thread writes."""

    def __init__(self) -> None:
        self._values: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()

    def add(self, name: str, label: str = "", amount: float = 1) -> None:
        with self._lock:
            self._values[name, label] += amount  # type: ignore[assignment]  # Counter is typed for whole numbers

    def get(self, name: str, label: str = "") -> float:
        return self._values[name, label]

    def all(self) -> dict[tuple[str, str], float]:
        with self._lock:
            return dict(self._values)


class Exporter:
    """A Prometheus collector. `workers`: address and _OF_WORKERS values."""

    def __init__(self, counts: DrafterCounts, workers: Callable[[], Iterable[tuple[str, dict[str, float]]]]) -> None:
        self._counts, self._workers = counts, workers

    def collect(self) -> Iterable[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        values, workers = self._counts.all(), list(self._workers())
        for name, (text, labels) in _COUNTERS.items():
            family = CounterMetricFamily(f"tandem:vllm_{name}", text, labels=labels)
            for (counted, label), value in values.items():
                if counted == name:
                    family.add_metric([label] if labels else [], value)
            yield family
        for name, (text, kind) in _OF_WORKERS.items():
            made: Any = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
            of_workers = made(f"tandem:vllm_worker_{name}", text, labels=("worker",))
            for address, of_worker in workers:
                of_workers.add_metric([address], of_worker[name])
            yield of_workers


def serve_metrics(exporter: Exporter, port: int) -> Callable[[], None]:
    """Serves metrics on all interfaces, as vLLM does; returns what ends it. Raises OSError."""
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry()
    registry.register(exporter)
    server, thread = start_http_server(port, registry=registry)
    log.info("metrics of the drafter are served on port %d", server.server_port)

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop
