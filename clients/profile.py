"""Writes costs to performance_<name>_<time>.csv and .json (--profile)."""

from __future__ import annotations

import csv
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tandem.speculation.types import GenerationEnd, SpeculationStats


class Profile:
    def __init__(self, name: str, folder: Path = Path()) -> None:
        self._name, self._folder = name, folder
        self._rows: list[dict[str, Any]] = []

    def add(self, completion: GenerationEnd, seconds: float, ttft_seconds: float | None = None) -> None:
        counts = completion.prompt_tokens, completion.output_tokens
        self._add("generate", completion.finish_reason.name.lower(), *counts, completion.stats, seconds, ttft_seconds)

    def add_session(self, session: Any, how: str) -> None:
        """Adds a target's session that ended `how`: "closed" or "expired"."""
        stats, seconds = session.stats, time.perf_counter() - session.started
        if session.opened:
            self._add("session", how, session.prompt_length, stats.accepted + stats.rounds, stats, seconds, None)

    def _add(
        self,
        kind: str,
        how: str,
        prompt_tokens: int,
        output_tokens: int,
        stats: SpeculationStats,
        seconds: float,
        ttft_seconds: float | None,
    ) -> None:
        row: dict[str, Any] = {
            "request": len(self._rows),
            "kind": kind,
            "prompt_tokens": prompt_tokens,
            "output_tokens": output_tokens,
            "finish_reason": how,
            "ttft_s": ttft_seconds,
            "end_to_end_latency_s": seconds,
            "tokens_per_second": output_tokens / seconds if seconds else None,
            "acceptance_rate": stats.accepted / stats.drafted if stats.drafted else None,
            "mean_acceptance_length": (stats.accepted + stats.rounds) / stats.rounds if stats.rounds else None,
            "wasted_drafts": stats.wasted_drafts,
            "mean_in_flight": stats.mean_in_flight,
            "max_in_flight": stats.max_in_flight,
            "mean_draft_length": stats.drafted / stats.rounds if stats.rounds else None,
            "rounds_by_length": stats.rounds_by_length,
            "acceptance_histogram": stats.acceptance_histogram,
        }
        self._rows.append(row | asdict(stats))

    def write(self) -> list[Path]:
        if not self._rows:
            return []
        stem = self._folder / f"performance_{self._name}_{time.strftime('%Y%m%d_%H%M%S')}"
        table, document = stem.with_suffix(".csv"), stem.with_suffix(".json")
        with table.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(self._rows[0]))
            writer.writeheader()
            writer.writerows(self._rows)
        document.write_text(json.dumps(self._rows, indent=2) + "\n")
        return [table, document]
