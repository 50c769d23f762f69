"""Prometheus metrics of requests and rounds, with vLLM's names, labels and buckets, so its dashboards work."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from tandem.speculation.types import Chunk, FinishReason, GenerationEnd, SpeculationStats

MODEL_LABELS = ("model_name", "engine")

_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
_PER_TOKEN = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_WHOLE = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
    *(1920.0, 7680.0),
)
OWN_PLACEMENT = "own"
CAUSES = ("prefill", "draft", "verify", "queue", "network")
COUNTS = (
    ("vllm:spec_decode_num_draft_tokens", "drafted", "Draft tokens verified."),
    ("vllm:spec_decode_num_accepted_tokens", "accepted", "Draft tokens accepted."),
    ("tandem:speculation_rounds", "rounds", "Rounds, those without a draft token included."),
    ("tandem:undrafted_rounds", "undrafted_rounds", "Rounds whose drafter failed."),
    ("tandem:stale_rounds_sent", "stale_rounds", "Rounds that were sent ahead and became stale."),
    ("tandem:wasted_run_steps", "wasted_steps", "Steps that a target ran on for nothing."),
    ("tandem:unverified_draft_tokens", "stale_drafts", "Draft tokens that no step verified."),
    ("tandem:feature_bytes", "feature_bytes", "Bytes of the target's features, for a draft head."),
)
BY_POSITION = (
    ("vllm:spec_decode_num_accepted_tokens_per_pos", "accepted_per_position", "Draft tokens accepted"),
    ("tandem:draft_tokens_per_pos", "drafted_per_position", "Draft tokens verified"),
)
"""Metric, field of SpeculationStats, help."""


class GenerationMetrics(Collector):
    """Sums the statistics of running requests, of ended ones and of sessions. `most`: draft tokens."""

    def __init__(self, registry: CollectorRegistry, model: str, most: int) -> None:
        self._registry, self._model, self._most = registry, (model, "0"), most
        self._lock, self._ended = threading.Lock(), SpeculationStats()  # scrapes run on another thread
        self._running: dict[int, SpeculationStats] = {}
        registry.register(self)
        self.prompt = self._counter("vllm:prompt_tokens", "Prompt tokens of successful requests and of sessions.")
        self.output = self._counter("vllm:generation_tokens", "Tokens committed.")
        success = Counter(
            "vllm:request_success",
            "Finished requests, by reason.",
            (*MODEL_LABELS, "finished_reason"),
            registry=registry,
        )
        self.finished = {r: success.labels(*self._model, r) for r in ("stop", "length", "abort", "error")}
        self.first = self._seconds("vllm:time_to_first_token_seconds", "Seconds to the first token.", _FIRST_TOKEN)
        self.between = self._seconds("vllm:inter_token_latency_seconds", "Seconds between chunks.", _PER_TOKEN)
        self.per_token = self._seconds(
            "vllm:request_time_per_output_token_seconds",
            "Mean seconds per output token of a request, after its first.",
            _PER_TOKEN,
        )
        self.whole = self._seconds("vllm:e2e_request_latency_seconds", "Seconds from request to end.", _WHOLE)
        self._placed = tuple(
            Counter(
                f"tandem:placed_{what}", f"{what.title()} of requests, by placement.", ("placement",), registry=registry
            )
            for what in ("tokens", "seconds")
        )

    def collect(self) -> Iterable[Metric]:
        total = SpeculationStats()
        with self._lock:
            for stats in (self._ended, *self._running.values()):
                _add(total, stats)
        drafts = total.drafted_per_position[0] if total.drafted_per_position else 0
        said = "Rounds with at least one draft token."
        yield _family("vllm:spec_decode_num_drafts", said, MODEL_LABELS, [(self._model, drafts)])
        for name, field, help_text in COUNTS:
            yield _family(name, help_text, MODEL_LABELS, [(self._model, getattr(total, field))])
        for name, field, help_text in BY_POSITION:
            counts = itertools.zip_longest(range(self._most), getattr(total, field), fillvalue=0)
            at = [((*self._model, str(i)), count) for i, (_, count) in enumerate(counts)]
            yield _family(name, f"{help_text}, by position from 0.", (*MODEL_LABELS, "position"), at)
        spent = [((cause,), getattr(total, f"{cause}_seconds")) for cause in CAUSES]
        yield _family("tandem:request_seconds", "Seconds of requests, by cause.", ("cause",), spent)

    def request(self, stats: SpeculationStats) -> WatchedRequest:
        with self._lock:
            self._running[id(stats)] = stats
        return WatchedRequest(self, stats)

    def ended(self, stats: SpeculationStats, tokens: int, seconds: float) -> None:
        with self._lock:
            _add(self._ended, self._running.pop(id(stats)))
        for counter, value in zip(self._placed, (tokens, seconds), strict=True):
            counter.labels(stats.placement or OWN_PLACEMENT).inc(value)

    def round(self, drafted: int, accepted: int) -> None:
        """Counts a session's round."""
        at = [1] * drafted, [1] * accepted + [0] * (drafted - accepted)
        with self._lock:
            _add(self._ended, SpeculationStats(1, drafted, accepted, at[1], at[0]))

    def _counter(self, name: str, help_text: str) -> Any:
        return Counter(name, help_text, MODEL_LABELS, registry=self._registry).labels(*self._model)

    def _seconds(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Any:
        histogram = Histogram(name, help_text, MODEL_LABELS, registry=self._registry, buckets=buckets)
        return histogram.labels(*self._model)


def _add(total: SpeculationStats, stats: SpeculationStats) -> None:
    for name in (*(field for _, field, _ in COUNTS), *(f"{cause}_seconds" for cause in CAUSES)):
        setattr(total, name, getattr(total, name) + getattr(stats, name))
    for _, name, _ in BY_POSITION:
        both = itertools.zip_longest(getattr(total, name), getattr(stats, name), fillvalue=0)
        setattr(total, name, [a + b for a, b in both])


def _family(
    name: str, help_text: str, labels: tuple[str, ...], samples: Iterable[tuple[tuple[str, ...], float]]
) -> Metric:
    family = CounterMetricFamily(name, help_text, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family


class WatchedRequest:
    """Times one Generate request."""

    def __init__(self, metrics: GenerationMetrics, stats: SpeculationStats) -> None:
        self._metrics, self._stats = metrics, stats
        self._began = time.perf_counter()
        self._first = self._last = 0.0
        self._tokens = 0

    def chunk(self, chunk: Chunk) -> None:
        now = time.perf_counter()
        if self._first:
            self._metrics.between.observe(now - self._last)
        else:
            self._first = now
            self._metrics.first.observe(now - self._began)
        self._last = now
        self._tokens += len(chunk.token_ids)
        self._metrics.output.inc(len(chunk.token_ids))

    def ended(self, end: GenerationEnd | BaseException) -> None:
        now, metrics = time.perf_counter(), self._metrics
        metrics.finished[_finished(end)].inc()
        metrics.whole.observe(now - self._began)
        metrics.ended(self._stats, self._tokens, now - self._began)
        if isinstance(end, GenerationEnd):
            metrics.prompt.inc(end.prompt_tokens)
            if self._tokens > 1:
                metrics.per_token.observe((self._last - self._first) / (self._tokens - 1))


def _finished(end: GenerationEnd | BaseException) -> str:
    if isinstance(end, GenerationEnd):
        return "length" if end.finish_reason is FinishReason.LENGTH else "stop"
    return "error" if isinstance(end, Exception) else "abort"
