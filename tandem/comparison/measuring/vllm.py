"""Servers of vLLM: their counters around each lone request, and how much their own texts vary."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import urllib.request
from collections.abc import Iterable, Mapping, Sequence

from tandem.comparison.measuring.architectures import AUTOREGRESSIVE
from tandem.comparison.measuring.config import ComparisonConfig
from tandem.comparison.measuring.identity import first_difference
from tandem.comparison.measuring.records import Record
from tandem.comparison.measuring.run import Contender, attempt
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

Texts = Mapping[str, tuple[int, ...]]  # tokens by answered prompt
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


async def own_texts(contenders: Sequence[Contender], config: ComparisonConfig, records: Sequence[Record]) -> str | None:
    """Repeats prompts on plain vLLM, alone and at once: its texts vary, which bounds any comparison with drafts.

    Returns the report's remark; None without plain decoding or with sampling.
    """
    plain = next((contender for contender in contenders if contender.name == AUTOREGRESSIVE.name), None)
    base = config.conditions[0]
    alone = _texts(r for r in records if (r.architecture, r.run, r.condition) == (AUTOREGRESSIVE.name, 0, base.name))
    if not (plain and alone and base.request.sampling.greedy):
        return None
    prompts = [prompt for prompt in config.prompts if prompt.name in alone]
    repeated = [
        attempt(
            plain.apart(),
            Record(plain.name, prompt.name, prompt.kind, 0, condition="own texts"),
            prompt.into(base.request),
            alone=False,
        )
        for prompt in (*prompts, *prompts)
    ]
    again = _texts([await each for each in repeated[: len(prompts)]])
    together = _texts(await asyncio.gather(*repeated[len(prompts) :]))
    return (
        f"vLLM's plain server against its own texts: asked for each prompt again, {compared(alone, again)};"
        f" asked for all of them at once, {compared(alone, together)}."
    )


def compared(truth: Texts, texts: Texts) -> str:
    """Counts equal and missing texts, and locates the first difference."""
    found = ((first_difference(truth[name], tokens), name) for name, tokens in texts.items())
    differing = [(at, name) for at, name in found if at is not None]
    same = f"{len(texts) - len(differing)} of {len(texts)} are the same"
    if differing:
        at, name = min(differing)
        same += f" (the earliest difference: token {at} of {name})"
    failed = len(truth) - len(texts)
    return same + (f", and {failed} failed" if failed else "")


def _texts(records: Iterable[Record]) -> dict[str, tuple[int, ...]]:
    return {record.prompt: record.measurement.output_token_ids for record in records if record.measurement}
