"""Metrics read from the server's parts at each scrape, on another thread: each read must be atomic."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tandem.engine.adapter_registry import MOST, Adapters
from tandem.engine.engine import Engine
from tandem.engine.slots import SlotPool
from tandem.services.shutdown import Lifecycle

PARTS: Mapping[str, Sequence[tuple[str, str, str]]] = {
    "slots": (("tandem:kv_slots", "count", "KV slots."), ("tandem:kv_slots_used", "used", "KV slots in use.")),
    "KV cache": (("vllm:kv_cache_usage_perc", "usage", "KV cache reserved; 1 is all."),),
    "KV memory": (
        ("tandem:kv_cache_bytes", "reserved", "Bytes that sequences reserve."),
        ("tandem:kv_cache_limit_bytes", "limit", "Most of them."),
    ),
    "prefix memory": (
        ("tandem:prefix_cache_bytes", "used_bytes", "Bytes of prefixes kept."),
        ("tandem:prefix_cache_limit_bytes", "limit_bytes", "Most of them."),
    ),
    "prefixes": (
        ("vllm:prefix_cache_queries_total", "queries", "Tokens of prompts looked up."),
        ("vllm:prefix_cache_hits_total", "hits", "Tokens of prompts found."),
    ),
    "remote prefill": (
        ("tandem:prefill_requests_total", "requests", "Prompts asked for at PrefillWorkers."),
        ("tandem:prefill_pages_total", "pages", "Pages that arrived."),
        ("tandem:prefill_bytes_total", "bytes", "Bytes of pages that arrived."),
        ("tandem:prefill_seconds_total", "seconds", "Seconds that prompts waited for their pages."),
    ),
    "prefill pages": (
        ("tandem:prefill_prompts_total", "asked", "Prompts that targets asked for."),
        ("tandem:prefill_pages_sent_total", "pages", "Pages handed out."),
    ),
    "batcher": (
        ("tandem:step_queue_depth", "waiting", "Rows waiting for a step."),
        ("tandem:hung_steps_total", "hung_steps", "Steps that exceeded their time limit."),
    ),
    "sessions": (
        ("tandem:sessions", "__len__", "Open sessions."),
        ("tandem:sessions_opened_total", "opened", "Sessions opened."),
        ("tandem:sessions_closed_total", "closed", "Sessions closed."),
        ("tandem:sessions_expired_total", "expired", "Sessions whose lease expired."),
    ),
    "drafter": (
        ("tandem:drafter_up", "up", "1 if the drafter is available."),
        ("tandem:draft_failures_total", "failures", "Failures of the drafter."),
    ),
    "rehearsal": (
        ("tandem:rehearsed_steps_total", "steps", "Steps that took another device's time."),
        ("tandem:rehearsed_late_steps_total", "late_steps", "Steps that ended later than that device's would."),
    ),
}
"""By part: metric, the part's attribute, help."""
Labels = Mapping[str, str]
Samples = Iterable[tuple[Labels, float]]


@dataclass(slots=True)
class _State:
    help: str
    labels: Sequence[str]
    reads: list[Callable[[], Samples]]


class States(Collector):
    """`names`: the model's labels."""

    def __init__(self, names: Labels) -> None:
        self._names, self._states = names, dict[str, _State]()

    def collect(self) -> Iterable[Metric]:
        for name, state in list(self._states.items()):
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            family = kind(name, state.help, labels=state.labels)
            for labels, value in (sample for read in state.reads for sample in read()):
                family.add_metric([labels[each] for each in state.labels], value)
            yield family

    def _add(self, name: str, help_text: str, labels: Iterable[str], read: Callable[[], Samples]) -> None:
        self._states.setdefault(name, _State(help_text, tuple(labels), [])).reads.append(read)

    def watch(self, kind: str, part: Any, labels: Labels | None = None) -> None:
        """Adds the metrics of a part of PARTS."""
        labels = labels or {}
        for name, attribute, help_text in PARTS[kind]:
            self._add(name, help_text, labels, partial(_one, labels, part, attribute))

    def constant(self, name: str, help_text: str, value: float, labels: Labels) -> None:
        self._add(name, help_text, labels, lambda: [(labels, value)])

    def _watch_counts(self, name: str, help_text: str, counts: Mapping[str, int], label: str, of: Labels) -> None:
        self._add(name, help_text, (*of, label), partial(_counts, counts, label, of))

    def watch_requests(self, lifecycle: Lifecycle, sessions: Iterable[Sized], slots: Sequence[SlotPool]) -> None:
        def waiting() -> int:
            return sum(pool.waiting for pool in slots)

        def running() -> int:
            return max(0, lifecycle.running - waiting()) + sum(len(table) for table in sessions)

        names, said = self._names, "Requests and sessions in progress."
        self._add("vllm:num_requests_running", said, names, lambda: [(names, running())])
        said = "Requests waiting for a KV slot."
        self._add("vllm:num_requests_waiting", said, names, lambda: [(names, waiting())])

    def watch_engines(self, engines: Mapping[str, Engine]) -> None:
        """`engines`: by the label `of`. vLLM's metrics are of the first one."""
        for of, engine in engines.items():
            self._watch_engine({"of": of}, engine)
        for engine in list(engines.values())[:1]:
            self.watch("KV cache", engine.slots, self._names)
            if engine.prefixes:
                self.watch("prefixes", engine.prefixes, self._names)
        if target := engines.get("target"):
            self._watch_adapters(target.adapters)
            said = "Fused calls that failed and were repeated as two steps."
            self._watch_counts("tandem:fused_fallbacks_total", said, target.fused_fallbacks, "error", {})
            if remote := target.remote_prefill:
                self.watch("remote prefill", remote)
                said = "Prompts that were processed in place after all."
                self._watch_counts("tandem:prefill_fallbacks_total", said, remote.fallbacks, "reason", {})

    def _watch_engine(self, of: Labels, engine: Engine) -> None:
        self.watch("slots", engine.slots, of)
        if engine.slots.memory:
            self.watch("KV memory", engine.slots.memory, of)
        if engine.prefixes:
            self.watch("prefix memory", engine.prefixes, of)
        if engine.structures:
            said = "Structures that were to be compiled, by outcome."
            self._watch_counts("tandem:structures_total", said, engine.structures.outcomes, "outcome", of)

    def _watch_adapters(self, adapters: Adapters) -> None:
        """Adds vLLM's metric, whose value is the scrape's time."""

        def in_use() -> Samples:
            used = {"running_lora_adapters": adapters.running, "waiting_lora_adapters": adapters.waiting}
            yield {"max_lora": str(MOST), **{name: ",".join(each) for name, each in used.items()}}, time.time()

        labels = ("max_lora", "waiting_lora_adapters", "running_lora_adapters")
        self._add("vllm:lora_requests_info", "Adapters that requests have now.", labels, in_use)


def _one(labels: Labels, part: Any, attribute: str) -> Samples:
    value = getattr(part, attribute)
    yield labels, value() if callable(value) else value


def _counts(counts: Mapping[str, int], label: str, of: Labels) -> Samples:
    return [({**of, label: name}, count) for name, count in list(counts.items())]
