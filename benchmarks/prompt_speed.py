"""Measures prompt processing: the time until the first token."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.contenders import Contender
from tandem.comparison.measuring.timed_request import rotated

REST_SECONDS = 0.1  # before a request: threads of the contender before it may still spin


@dataclass(frozen=True, slots=True)
class PromptSpeed:
    """Seconds per prompt of this length; contenders got the same prompts."""

    contender: str
    tokens: int
    seconds: tuple[float, ...]

    @property
    def rate(self) -> float:
        """Prompt tokens per second, median."""
        return self.tokens / statistics.median(self.seconds)


async def measure_prompts(
    contenders: Sequence[Contender],
    text: Sequence[int],
    lengths: Sequence[int],
    runs: int,
    say: Callable[[str], None],
    speeds: list[PromptSpeed],
) -> None:
    """Asks for one token after `runs` prompts of every length, with different beginnings so that none is cached."""
    for length in lengths:
        taken: dict[str, list[float]] = {contender.name: [] for contender in contenders}
        for run in range(runs + 1):
            prompt = part(text, length, run)
            for contender in rotated(contenders, run):
                await asyncio.sleep(REST_SECONDS)
                answered = await contender.answer(prompt, 1)
                if run:
                    taken[contender.name].append(answered.seconds)
        for name, seconds in taken.items():
            speeds.append(PromptSpeed(name, length, tuple(seconds)))
            say(f"prompts of {length} tokens, {name}: {speeds[-1].rate:.0f} tokens/s")


def part(text: Sequence[int], length: int, run: int) -> list[int]:
    """Returns `length` tokens of the text from another beginning in every run, around its end."""
    begin = run * (length + 7) % len(text)
    return [text[(begin + i) % len(text)] for i in range(length)]


def speedup(speeds: Sequence[PromptSpeed], ours: str, theirs: str, tokens: int) -> float | None:
    """Returns the median over prompts of their time over ours; None if not measured."""
    found = {speed.contender: speed.seconds for speed in speeds if speed.tokens == tokens}
    if ours not in found or theirs not in found:
        return None
    return statistics.median(b / a for a, b in zip(found[ours], found[theirs], strict=True))
