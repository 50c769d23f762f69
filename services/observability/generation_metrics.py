"""Prometheus metrics of requests and rounds, with vLLM's names, labels and buckets, so its dashboards work."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram

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
_CAUSES = ("prefill", "draft", "verify", "queue", "network")


class GenerationMetrics:
    def __init__(self, registry: CollectorRegistry, model: str, most: int) -> None:
        self._registry, self._model = registry, (model, "0")
        self.prompt = self._counter("vllm:prompt_tokens", "Prompt tokens of successful requests and of sessions.")
        self.output = self._counter("vllm:generation_tokens", "Tokens committed.")
        self._drafts = self._counter("vllm:spec_decode_num_drafts", "Rounds with at least one draft token.")
        self._drafted = self._counter("vllm:spec_decode_num_draft_tokens", "Draft tokens verified.")
        self._accepted = self._counter("vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted.")
        # Counters by position, looked up once.
        self._accepted_at = self._by_position(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "Draft tokens accepted, by position from 0.", most
        )
        self._drafted_at = self._by_position(
            "tandem:draft_tokens_per_pos", "Draft tokens verified, by position from 0.", most
        )
        self._rounds = self._counter("tandem:speculation_rounds", "Rounds, those without a draft token included.")
        self._undrafted = self._counter("tandem:undrafted_rounds", "Rounds whose drafter failed.")
        self._stale = self._counter("tandem:stale_rounds_sent", "Rounds that were sent ahead and became stale.")
        self._wasted = self._counter("tandem:wasted_run_steps", "Steps that a target ran on for nothing.")
        self._unverified = self._counter("tandem:unverified_draft_tokens", "Draft tokens that no step verified.")
        self._features = self._counter("tandem:feature_bytes", "Bytes of the target's features, for a draft head.")
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
        spent = Counter("tandem:request_seconds", "Seconds of requests, by cause.", ("cause",), registry=registry)
        self._spent = {cause: spent.labels(cause) for cause in _CAUSES}
        self._placed = tuple(
            Counter(
                f"tandem:placed_{what}", f"{what.title()} of requests, by placement.", ("placement",), registry=registry
            )
            for what in ("tokens", "seconds")
        )

    def request(self, stats: SpeculationStats) -> WatchedRequest:
        return WatchedRequest(self, stats)

    def round(self, drafted: int, accepted: int) -> None:
        self._rounds.inc()
        self._drafts.inc(drafted > 0)
        self._drafted.inc(drafted)
        self._accepted.inc(accepted)
        for position in range(drafted):
            self._drafted_at(position).inc()
        for position in range(accepted):
            self._accepted_at(position).inc()

    def count_growth(self, stats: SpeculationStats, before: tuple[int, int, int, list[int], list[int]]) -> None:
        """Counts the growth since `before`: rounds, undrafted, stale, drafted and accepted by position."""
        rounds, undrafted, stale, drafted_at, accepted_at = before
        self._undrafted.inc(stats.undrafted_rounds - undrafted)
        self._rounds.inc(stats.rounds - rounds)
        self._stale.inc(stats.stale_rounds - stale)
        for position, now in enumerate(stats.drafted_per_position):
            drafted = now - (drafted_at[position] if position < len(drafted_at) else 0)
            accepted = stats.accepted_per_position[position]
            accepted -= accepted_at[position] if position < len(accepted_at) else 0
            if drafted:
                self._drafts.inc(drafted if position == 0 else 0)
                self._drafted.inc(drafted)
                self._accepted.inc(accepted)
                self._drafted_at(position).inc(drafted)
                self._accepted_at(position).inc(accepted)

    def wasted(self, stats: SpeculationStats) -> None:
        """Counts a request's discarded work, and bytes sent to its draft head."""
        self._features.inc(stats.feature_bytes)
        self._wasted.inc(stats.wasted_steps)
        self._unverified.inc(stats.stale_drafts)

    def spent(self, stats: SpeculationStats) -> None:
        for cause, counter in self._spent.items():
            counter.inc(getattr(stats, f"{cause}_seconds"))

    def placed(self, stats: SpeculationStats, tokens: int, seconds: float) -> None:
        """Counts a finished request by the placement that answered."""
        for counter, value in zip(self._placed, (tokens, seconds), strict=True):
            counter.labels(stats.placement or OWN_PLACEMENT).inc(value)

    def _counter(self, name: str, help_text: str) -> Any:
        return Counter(name, help_text, MODEL_LABELS, registry=self._registry).labels(*self._model)

    def _by_position(self, name: str, help_text: str, most: int) -> Callable[[int], Counter]:
        counter = Counter(name, help_text, (*MODEL_LABELS, "position"), registry=self._registry)
        at = functools.cache(lambda position: counter.labels(*self._model, str(position)))
        for position in range(most):
            at(position)
        return at

    def _seconds(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Any:
        histogram = Histogram(name, help_text, MODEL_LABELS, registry=self._registry, buckets=buckets)
        return histogram.labels(*self._model)


class WatchedRequest:
    """Counts one Generate request's rounds as they come, even if it fails."""

    def __init__(self, metrics: GenerationMetrics, stats: SpeculationStats) -> None:
        self._metrics, self._stats = metrics, stats
        self._began = time.perf_counter()
        self._first = self._last = 0.0
        self._tokens = 0
        self._seen: tuple[int, int, int, list[int], list[int]] = (0, 0, 0, [], [])

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
        self._count()

    def ended(self, end: GenerationEnd | BaseException) -> None:
        now, metrics = time.perf_counter(), self._metrics
        self._count()
        metrics.spent(self._stats)
        metrics.wasted(self._stats)
        metrics.finished[_finished(end)].inc()
        metrics.whole.observe(now - self._began)
        metrics.placed(self._stats, self._tokens, now - self._began)
        if isinstance(end, GenerationEnd):
            metrics.prompt.inc(end.prompt_tokens)
            if self._tokens > 1:
                metrics.per_token.observe((self._last - self._first) / (self._tokens - 1))

    def _count(self) -> None:
        stats = self._stats
        self._metrics.count_growth(stats, self._seen)
        drafted, accepted = list(stats.drafted_per_position), list(stats.accepted_per_position)
        self._seen = (stats.rounds, stats.undrafted_rounds, stats.stale_rounds, drafted, accepted)


def _finished(end: GenerationEnd | BaseException) -> str:
    if isinstance(end, GenerationEnd):
        return "length" if end.finish_reason is FinishReason.LENGTH else "stop"
    return "error" if isinstance(end, Exception) else "abort"
