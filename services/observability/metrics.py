"""Prometheus metrics: vLLM's names, else `tandem:` (docs/observability.md). Imported only if on (extra `metrics`)."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from tandem.engine.adapter_registry import Adapters
from tandem.engine.batcher import Batcher
from tandem.engine.engine import Engine
from tandem.engine.prefill import PageRow
from tandem.engine.prefix_cache import PrefixCache
from tandem.engine.slots import SlotPool
from tandem.engine.structures import OUTCOMES, Structures
from tandem.rpc.wire_sessions import drafted_in
from tandem.runners.feature_rows import FeatureRow
from tandem.runners.protocol import FusedRow, PrefillRow, ProposeRow, VerifyRow
from tandem.services.layers import Call
from tandem.services.lifecycle import Lifecycle
from tandem.services.observability.adapter_metrics import watch_adapters
from tandem.services.observability.calls import CallObserver
from tandem.services.observability.generation_metrics import MODEL_LABELS, GenerationMetrics
from tandem.services.observability.scraped_metrics import ScrapedMetrics
from tandem.services.sessions.table import CountedSessions
from tandem.speculation.fallible import DrafterHealth

_STEP = (0.0005, 0.001, 0.002, 0.004, 0.006, 0.008, 0.012, 0.016, 0.024, 0.032, 0.064, 0.128, 0.25, 0.5, 1.0, 2.5, 10.0)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
_KINDS = {
    PrefillRow: "prefill",
    ProposeRow: "propose",
    VerifyRow: "verify",
    FusedRow: "fused",
    PageRow: "pages",
    FeatureRow: "features",
}


class Metrics(CallObserver):
    """One server's registry. `info` becomes labels of tandem:build_info."""

    def __init__(self, role: str, model: str, most_drafted: int, info: Mapping[str, str]) -> None:
        self.registry = CollectorRegistry()
        self._names = dict(zip(MODEL_LABELS, (model, "0"), strict=True))
        self.states = ScrapedMetrics()
        self.registry.register(self.states)
        build = Gauge(
            "tandem:build_info",
            "Versions and model of this server; always 1.",
            ("role", "model_name", *info),
            registry=self.registry,
        )
        build.labels(role, model, *info.values()).set(1)
        self.generation = GenerationMetrics(self.registry, model, most_drafted)
        self._rpcs = self._counter("tandem:rpcs", "Calls that ended, by status.", ("method", "code"))
        self._refusals = self._counter("tandem:refusals", "Calls that failed, by ErrorInfo.", ("method", "reason"))
        self._bytes = self._counter("tandem:bytes", "Protobuf payload of messages.", ("method", "direction"))
        self._rounds = self._counter("tandem:rounds", "Rounds of sessions, by outcome.", ("outcome", "transport"))
        for outcome, transport in itertools.product(("applied", "replayed", "stale"), ("unary", "stream", "run")):
            self._rounds.labels(outcome, transport)
        self._run_bytes = self._counter("tandem:run_bytes", "Protobuf payload of runs.", ("direction",))
        self._run_steps = self._counter("tandem:run_steps", "Steps of runs, with or without a draft.", ("draft",))
        for draft in ("with", "without"):
            self._run_steps.labels(draft)
        self._resumes = self._counter(
            "tandem:session_resumes", "Sessions opened with more tokens than their prompt.", ()
        )
        histograms = (
            self._by_kind("tandem:step_seconds", "Seconds of a device step.", _STEP),
            self._by_kind("tandem:step_queue_seconds", "Seconds that a row waited for its step.", _STEP),
            self._by_kind("tandem:step_rows", "Rows that shared a step.", _ROWS),
        )
        self._chunks = self._counter("tandem:prefill_chunks", "Prompt chunks processed.", ())
        # Labels are looked up once, because messages and steps are frequent.
        self._round_of = functools.cache(self._rounds.labels)
        self._bytes_of = functools.cache(self._bytes.labels)
        self._step_of = functools.cache(lambda kind: [h.labels(kind) for h in histograms])

    # --- states read at each scrape ---

    def watch_requests(
        self, lifecycle: Lifecycle, sessions: Sequence[CountedSessions], slots: Sequence[SlotPool]
    ) -> None:
        def waiting() -> int:
            return sum(pool.waiting for pool in slots)

        def running() -> int:
            return max(0, lifecycle.running - waiting()) + sum(len(table) for table in sessions)

        add = self.states.gauge
        add("vllm:num_requests_running", "Requests and sessions in progress.", self._names, running)
        add("vllm:num_requests_waiting", "Requests waiting for a KV slot.", self._names, waiting)
        for pool in slots[:1]:
            add(
                "vllm:kv_cache_usage_perc", "KV cache reserved; 1 is all.", self._names, partial(getattr, pool, "usage")
            )

    def watch_structures(self, structures: Mapping[str, Structures]) -> None:
        for (of, each), outcome in itertools.product(structures.items(), OUTCOMES):
            read = partial(each.outcomes.__getitem__, outcome)
            label = {"of": of, "outcome": outcome}
            self.states.counter("tandem:structures", "Structures that were to be compiled, by outcome.", label, read)

    def watch_slots(self, of: str, slots: SlotPool) -> None:
        """Adds gauges of KV slots. `of`: target or draft."""
        add, label = self.states.gauge, {"of": of}
        add("tandem:kv_slots", "KV slots.", label, lambda: slots.count)
        add("tandem:kv_slots_used", "KV slots in use.", label, lambda: slots.count - slots.free)
        if memory := slots.memory:
            add("tandem:kv_cache_bytes", "Bytes that sequences reserve.", label, lambda: memory.reserved)
            add("tandem:kv_cache_limit_bytes", "Most of them.", label, lambda: memory.limit)

    def watch_prefixes(self, caches: Mapping[str, PrefixCache]) -> None:
        """Adds prefix cache metrics; tokens are of the first cache."""
        for of, cache in caches.items():
            add, label = self.states.gauge, {"of": of}
            add("tandem:prefix_cache_bytes", "Bytes of prefixes kept.", label, partial(getattr, cache, "used_bytes"))
            add("tandem:prefix_cache_limit_bytes", "Most of them.", label, partial(getattr, cache, "limit_bytes"))
        for cache in list(caches.values())[:1]:
            count, names = self.states.counter, self._names
            count(
                "vllm:prefix_cache_queries", "Tokens of prompts looked up.", names, partial(getattr, cache, "queries")
            )
            count("vllm:prefix_cache_hits", "Tokens of prompts found.", names, partial(getattr, cache, "hits"))

    def watch_adapters(self, adapters: Adapters) -> None:
        watch_adapters(self.states, adapters)

    def watch_steps(self, batcher: Batcher) -> None:
        batcher.observe = self._stepped
        self.states.gauge("tandem:step_queue_depth", "Rows waiting for a step.", {}, lambda: batcher.waiting)
        self.states.counter(
            "tandem:hung_steps", "Steps that exceeded their time limit.", {}, lambda: batcher.hung_steps
        )

    def watch_fused(self, target: Engine) -> None:
        self.states.counters(
            "tandem:fused_fallbacks",
            "Fused calls that failed and were repeated as two steps.",
            ("error",),
            lambda: [({"error": kind}, count) for kind, count in list(target.fused_fallbacks.items())],
        )

    def watch_sessions(self, kind: str, table: CountedSessions) -> None:
        """Adds session metrics. `kind`: verify or propose."""
        add, label = self.states, {"kind": kind}
        add.gauge("tandem:sessions", "Open sessions.", label, lambda: len(table))
        add.counter("tandem:sessions_opened", "Sessions opened.", label, lambda: table.opened)
        add.counter("tandem:sessions_closed", "Sessions closed.", label, lambda: table.closed)
        add.counter("tandem:sessions_expired", "Sessions whose lease expired.", label, lambda: table.expired)

    def watch_drafter(self, health: DrafterHealth) -> None:
        add = self.states
        add.gauge("tandem:drafter_up", "1 if the drafter is available.", {}, lambda: int(health.up))
        add.counter("tandem:draft_failures", "Failures of the drafter.", {}, lambda: health.failures)

    def started(self, seconds: Mapping[str, float]) -> None:
        stages = Gauge("tandem:startup_seconds", "Seconds of start-up, by stage.", ("stage",), registry=self.registry)
        for stage, taken in seconds.items():
            stages.labels(stage).set(taken)

    # --- events of calls and steps ---

    def received(self, call: Call, size: int) -> None:
        self._bytes_of(call.method, "in").inc(size)
        if call.in_run:
            self._run_bytes.labels("in").inc(size)

    def sent(self, call: Call, size: int) -> None:
        self._bytes_of(call.method, "out").inc(size)
        if call.in_run:
            self._run_bytes.labels("out").inc(size)

    def replied(self, call: Call, request: Any, reply: Any, seconds: float) -> None:
        if call.method == "TargetVerifier/Verify":
            self._round("unary", request, reply)
        elif call.method == "TargetVerifier/VerifyStream":
            self._round("run" if reply.messages_read else "stream", request, reply)
        elif call.method == "TargetVerifier/OpenSession":
            if len(request.prefix) > request.prompt_length:
                self._resumes.inc()
            else:
                self.generation.prompt.inc(request.prompt_length)

    def ended(self, call: Call) -> None:
        self._rpcs.labels(call.method, call.code).inc()
        if call.reason:
            self._refusals.labels(call.method, call.reason).inc()

    def _round(self, transport: str, request: Any, reply: Any) -> None:
        outcome = "stale" if reply.stale else "replayed" if reply.replayed else "applied"
        self._round_of(outcome, transport).inc()
        if outcome == "applied":
            self.generation.output.inc(len(reply.token_ids))
            drafted = drafted_in(request, reply)
            self.generation.round(drafted, reply.accepted)
            if transport == "run":
                self._run_steps.labels("with" if drafted else "without").inc()

    def _stepped(self, row: Any, rows: int, queue_seconds: float, seconds: float) -> None:
        kind = _KINDS.get(type(row), "other")
        for histogram, value in zip(self._step_of(kind), (seconds, queue_seconds, rows), strict=True):
            histogram.observe(value)
        if kind == "prefill":
            self._chunks.inc(rows)

    def _counter(self, name: str, help_text: str, labels: tuple[str, ...]) -> Counter:
        return Counter(name, help_text, labels, registry=self.registry)

    def _by_kind(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, help_text, ("kind",), registry=self.registry, buckets=buckets)
