"""Reads the counters that vLLM and our drafter in it keep, before and after each request that is alone."""

from __future__ import annotations

import asyncio
import re
import urllib.request
from collections.abc import Mapping, Sequence

from tandem.speculation.types import SpeculationStats

SPOKEN = "vllm:generation_tokens_total"
STEPS = "vllm:iteration_tokens_total_count"
DRAFTS = "vllm:spec_decode_num_drafts_total"
DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
AT_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
BY_SOURCE = "tandem:vllm_draft_tokens_total", "tandem:vllm_accepted_tokens_total"
LONGEST_PAGE = 1 << 22
MOST_POSITIONS = 64
TRIES, PAUSE_SECONDS, READ_SECONDS = 40, 0.025, 10.0
"""vLLM counts a step after it has sent its tokens."""
_LINE = re.compile(r"^(vllm:\w+|tandem:vllm_\w+)(?:\{([^}]*)\})? ([0-9.eE+]+)$")
_LABEL = re.compile(r'(position|source)="(\w+)"')

Values = Mapping[tuple[str, str], float]
"""The values of counters by name and by position or source; "" where a counter has neither."""


class Counters:
    """The counters of one server. `pages`: where Prometheus reads them, vLLM's own first."""

    def __init__(self, pages: Sequence[str]) -> None:
        self._pages = pages
        self._before: Values = {}

    async def begin(self) -> None:
        """Remembers what was counted before a request."""
        self._before = await self._read()

    async def stats(self, tokens: int) -> SpeculationStats:
        """Returns the counts since `begin`, when they include the request's `tokens`; none if they never do."""
        for _ in range(TRIES):
            found = difference(self._before, await self._read())
            if found.get((SPOKEN, ""), 0) >= tokens:
                return stats_of(found)
            await asyncio.sleep(PAUSE_SECONDS)
        return SpeculationStats()

    async def _read(self) -> Values:
        pages = await asyncio.gather(*(asyncio.to_thread(read, page) for page in self._pages))
        return {key: value for page in pages for key, value in page.items()}


def read(page: str) -> Values:
    """Returns the counters of a page; none if it cannot be read."""
    try:
        with urllib.request.urlopen(page, timeout=READ_SECONDS) as answer:
            return parsed(answer.read(LONGEST_PAGE).decode(errors="replace"))
    except (OSError, ValueError):
        return {}


def parsed(text: str) -> Values:
    """Returns the values of the lines of Prometheus' text that are ours to read, of all engines together."""
    values: dict[tuple[str, str], float] = {}
    for line in text.splitlines():
        if found := _LINE.match(line):
            label = _LABEL.search(found[2] or "")
            key = found[1], label[2] if label else ""
            values[key] = values.get(key, 0.0) + float(found[3])
    return values


def difference(before: Values, after: Values) -> Values:
    return {key: value - before.get(key, 0.0) for key, value in after.items()}


def stats_of(counted: Values) -> SpeculationStats:
    """Returns the counts of a request. Steps are rounds, the one of the prompt's end too, as with our servers.

    vLLM does not say how long its drafts were. Where all must have been as long as the longest, positions are known;
    else only the first one is.
    """

    def of(name: str, label: str = "") -> int:
        return round(counted.get((name, label), 0.0))

    drafts, drafted = of(DRAFTS), of(DRAFTED)
    counts = {
        int(label): value for (name, label), value in counted.items() if name == AT_POSITION and label.isdecimal()
    }
    at = [round(counts.get(i, 0.0)) for i in range(min(MOST_POSITIONS, max(counts, default=-1) + 1))]
    known = len(at) if drafted == drafts * len(at) else min(1, len(at))
    by = [
        {label: round(value) for (found, label), value in counted.items() if found == name and value}
        for name in BY_SOURCE
    ]
    return SpeculationStats(
        rounds=of(STEPS),
        drafted=drafted,
        accepted=of(ACCEPTED),
        accepted_per_position=at[:known] if drafts else [],
        drafted_per_position=[drafts] * known if drafts else [],
        drafted_by=by[0],
        accepted_by=by[1],
    )
