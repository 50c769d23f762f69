"""Servers of vLLM: their counters around each lone request."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import urllib.request
from collections.abc import Mapping

from tandem.speculation.types import SpeculationStats

GENERATED = "vllm:generation_tokens_total"
STEPS = "vllm:iteration_tokens_total_count"
DRAFTS = "vllm:spec_decode_num_drafts_total"
DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
AT_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
LONGEST_PAGE = 1 << 22
MOST_POSITIONS = 64
TRIES, PAUSE_SECONDS, READ_SECONDS = 40, 0.025, 10.0  # vLLM counts a step after sending its tokens
_LINE = re.compile(r"^(vllm:\w+)(?:\{([^}]*)\})? ([0-9.eE+]+)$")
_POSITION = re.compile(r'position="(\d+)"')

Values = Mapping[tuple[str, str], float]  # by name and position ("": none)


class Counters:
    def __init__(self, base: str) -> None:
        self._page = f"{base}/metrics"
        self._before: Values = {}

    async def begin(self) -> None:
        self._before = await self._read()

    async def stats(self, tokens: int) -> SpeculationStats:
        """Returns the counts since `begin` once they include `tokens`; zeros if they never do."""
        for _ in range(TRIES):
            now = await self._read()
            counted = {key: value - self._before.get(key, 0.0) for key, value in now.items()}
            if counted.get((GENERATED, ""), 0) >= tokens:
                return stats_of(counted)
            await asyncio.sleep(PAUSE_SECONDS)
        return SpeculationStats()

    async def _read(self) -> Values:
        try:
            return parsed(await asyncio.to_thread(_page, self._page, LONGEST_PAGE))
        except (OSError, http.client.HTTPException, ValueError):
            return {}


async def version_at(base: str) -> str:
    """Returns vLLM's name and, if served, version."""
    try:
        return f"vLLM {json.loads(await asyncio.to_thread(_page, f'{base}/version', 1 << 12))['version']}"
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError):
        return "vLLM"


def _page(url: str, longest: int) -> str:
    with urllib.request.urlopen(url, timeout=READ_SECONDS) as answer:
        return str(answer.read(longest).decode(errors="replace"))


def parsed(text: str) -> Values:
    """Parses vLLM's counters from Prometheus' text, summed over engines."""
    values: dict[tuple[str, str], float] = {}
    for line in text.splitlines():
        if found := _LINE.match(line):
            position = _POSITION.search(found[2] or "")
            key = found[1], position[1] if position else ""
            values[key] = values.get(key, 0.0) + float(found[3])
    return values


def stats_of(counted: Values) -> SpeculationStats:
    """Returns a request's counts; positions after the first only if all drafts were of full length."""

    def count(name: str, position: str = "") -> int:
        return round(counted.get((name, position), 0.0))

    drafts, drafted = count(DRAFTS), count(DRAFTED)
    positions = [int(position) for name, position in counted if name == AT_POSITION and position]
    at = [count(AT_POSITION, str(i)) for i in range(min(MOST_POSITIONS, max(positions, default=-1) + 1))]
    known = len(at) if drafted == drafts * len(at) else min(1, len(at))
    return SpeculationStats(
        rounds=count(STEPS),
        drafted=drafted,
        accepted=count(ACCEPTED),
        accepted_per_position=at[:known] if drafts else [],
        drafted_per_position=[drafts] * known if drafts else [],
    )
