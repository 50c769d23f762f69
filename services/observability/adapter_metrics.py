"""Metrics of loaded LoRA adapters, read at each scrape."""

from __future__ import annotations

import time
from functools import partial

from tandem.engine.adapter_registry import MOST, Adapters
from tandem.services.observability.scraped_metrics import Samples, ScrapedMetrics

_HELP = {
    "requests": "Requests and sessions that had the adapter.",
    "rounds": "Rounds of rows that had the adapter.",
    "drafted": "Draft tokens verified with the adapter.",
    "accepted": "Draft tokens accepted with the adapter.",
    "committed": "Tokens committed with the adapter.",
}
_NAMES = {"drafted": "draft_tokens", "accepted": "accepted_tokens", "committed": "generation_tokens"}


def watch_adapters(states: ScrapedMetrics, adapters: Adapters) -> None:
    """Adds vLLM's adapter metric, whose value is the scrape time, and counters per adapter."""

    def in_use() -> Samples:
        used = {"running_lora_adapters": adapters.running, "waiting_lora_adapters": adapters.waiting}
        yield {"max_lora": str(MOST), **{name: ",".join(each) for name, each in used.items()}}, time.time()

    labels = ("max_lora", "waiting_lora_adapters", "running_lora_adapters")
    states.gauges("vllm:lora_requests_info", "Adapters that requests have now.", labels, in_use)
    for what, said in _HELP.items():
        states.counters(
            f"tandem:adapter_{_NAMES.get(what, what)}", said, ("adapter",), partial(_counted, adapters, what)
        )


def _counted(adapters: Adapters, what: str) -> Samples:
    return [({"adapter": name}, getattr(adapter, what)) for name, adapter in adapters.loaded.items()]
