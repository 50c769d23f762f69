"""Metrics of remote prefill, at the target and at the PrefillWorker."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from tandem.engine.prefill import REASONS, PrefillPages, RemotePrefill

if TYPE_CHECKING:
    from tandem.services.observability.scraped_metrics import ScrapedMetrics


def watch_prefill(states: ScrapedMetrics, elsewhere: RemotePrefill) -> None:
    count = states.counter
    for name, said in (
        ("requests", "Prompts asked for at PrefillWorkers."),
        ("pages", "Pages that arrived."),
        ("bytes", "Bytes of pages that arrived."),
        ("seconds", "Seconds that prompts waited for their pages."),
    ):
        count(f"tandem:prefill_{name}", said, {}, partial(getattr, elsewhere, name))
    for reason in REASONS:
        read = partial(elsewhere.fallbacks.__getitem__, reason)
        count("tandem:prefill_fallbacks", "Prompts that were processed in place after all.", {"reason": reason}, read)


def watch_prefill_pages(states: ScrapedMetrics, pages: PrefillPages) -> None:
    states.counter("tandem:prefill_prompts", "Prompts that targets asked for.", {}, partial(getattr, pages, "asked"))
    states.counter("tandem:prefill_pages_sent", "Pages handed out.", {}, partial(getattr, pages, "pages"))
