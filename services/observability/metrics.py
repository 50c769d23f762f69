"""Prometheus metrics: vLLM's names, else `tandem:` (docs/observability.md). Imported only if on (extra `metrics`)."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram

from tandem.engine.batcher import Batcher
from tandem.engine.prefill import PageRun
from tandem.rpc.wire_sessions import drafted_in
from tandem.runners.capabilities import FeatureRow
from tandem.runners.protocol import FusedRow, PrefillRow, ProposeRow, VerifyRow
from tandem.services.calls import Call, CallObserver
from tandem.services.observability.engine_metrics import States
from tandem.services.observability.generation_metrics import MODEL_LABELS, GenerationMetrics
from tandem.speculation.types import Rehearsal

_STEP = (0.0005, 0.001, 0.002, 0.004, 0.006, 0.008, 0.012, 0.016, 0.024, 0.032, 0.064, 0.128, 0.25, 0.5, 1.0, 2.5, 10.0)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
_KINDS = {
    PrefillRow: "prefill",
    ProposeRow: "propose",
    VerifyRow: "verify",
    FusedRow: "fused",
    PageRun: "pages",
    FeatureRow: "features",
}


class Metrics(CallObserver):
    """One server's registry. `info` becomes labels of tandem:build_info."""

    def __init__(
        self, role: str, model: str, most_drafted: int, info: Mapping[str, str], rehearsals: Sequence[Rehearsal] = ()
    ) -> None:
        self.registry = CollectorRegistry()
        self.states = States(dict(zip(MODEL_LABELS, (model, "0"), strict=True)))
        self.registry.register(self.states)
        of = {"role": role, "model_name": model, **info}
        self.states.constant("tandem:build_info", "Versions and model of this server; always 1.", 1, of)
        for each in rehearsals:
            self.states.watch("rehearsal", each, {"of": each.part})
            said = {"of": each.part, "name": each.name, "device": each.device, "source": each.source}
            self.states.constant("tandem:rehearsal_info", "Whose step times are rehearsed; always 1.", 1, said)
        self.generation = GenerationMetrics(self.registry, model, most_drafted)
        self._rpcs = self._counter("tandem:rpcs", "Calls that ended, by status.", ("method", "code"))
        self._refusals = self._counter("tandem:refusals", "Calls that failed, by ErrorInfo.", ("method", "reason"))
        self._bytes = self._counter("tandem:bytes", "Protobuf payload of messages.", ("method", "direction"))
        self._rounds = self._counter("tandem:rounds", "Rounds of sessions, by outcome.", ("outcome", "transport"))
        for outcome, transport in itertools.product(("applied", "replayed", "stale"), ("unary", "stream", "run")):
            self._rounds.labels(outcome, transport)
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

    def watch_steps(self, batcher: Batcher) -> None:
        batcher.observe = self._stepped
        self.states.watch("batcher", batcher)

    def started(self, seconds: Mapping[str, float]) -> None:
        for stage, taken in seconds.items():
            self.states.constant("tandem:startup_seconds", "Seconds of start-up, by stage.", taken, {"stage": stage})

    def received(self, call: Call, message: Any, size: int | None) -> None:
        self._bytes_of(call.method, "in").inc(size or 0)

    def sent(self, call: Call, size: int) -> None:
        self._bytes_of(call.method, "out").inc(size)

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
