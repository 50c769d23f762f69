"""Measures tokens per second under concurrent requests."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from benchmarks.contenders import Crowd
from tandem.comparison.measuring.timed_request import rotated

WARM_UP_TOKENS = 6

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Load:
    """One contender at one concurrency."""

    contender: str
    concurrency: int
    requests: int
    tokens: int
    seconds: float
    as_alone: int  # requests with the same tokens as at the lowest level

    @property
    def rate(self) -> float:
        """Tokens per second, prompt processing included."""
        return self.tokens / self.seconds


async def measure_load(
    contenders: Sequence[Crowd],
    prompts: Sequence[Sequence[int]],
    levels: Sequence[int],
    max_new_tokens: int,
    say: Callable[[str], None],
    loads: list[Load],
) -> None:
    """Measures every level in waves of concurrent requests, about equally often per prompt."""
    for contender in contenders:
        for level in levels:
            await contender.answer_all(_first(prompts, level), min(WARM_UP_TOKENS, max_new_tokens))
    alone: dict[tuple[str, int], tuple[int, ...]] = {}
    for turn, level in enumerate(levels):
        for contender in rotated(contenders, turn):
            loads.append(await _load(contender, prompts, level, max_new_tokens, alone))
            say(f"{level} at once, {contender.name}: {loads[-1].rate:.1f} tokens/s")


async def _load(
    contender: Crowd,
    prompts: Sequence[Sequence[int]],
    level: int,
    max_new_tokens: int,
    alone: dict[tuple[str, int], tuple[int, ...]],
) -> Load:
    asked = _first(list(enumerate(prompts)), -(-len(prompts) // level) * level)  # whole waves
    seconds, tokens, same = 0.0, 0, 0
    for start in range(0, len(asked), level):
        wave = asked[start : start + level]
        sent = time.perf_counter()
        answers = await contender.answer_all([prompt for _, prompt in wave], max_new_tokens)
        seconds += time.perf_counter() - sent
        for (number, _), answered in zip(wave, answers, strict=True):
            tokens += len(answered.token_ids)
            same += alone.setdefault((contender.name, number), answered.token_ids) == answered.token_ids
    return Load(contender.name, level, len(asked), tokens, seconds, same)


def _first(values: Sequence[T], count: int) -> list[T]:
    """Returns `count` prompts, starting again after the last."""
    return list(itertools.islice(itertools.cycle(values), count))
