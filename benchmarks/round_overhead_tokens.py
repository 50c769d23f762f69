"""Times what a token of plain decoding costs beside its step, for benchmarks/round_overhead.py.

The device goes on by itself, or waits for the event loop after every step, in turn in one process. Steps of the toy
runner sleep, so they leave the cores to Python: the device's idle time between two steps is Python's own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from benchmarks.figures import quantile
from benchmarks.round_overhead_rows import SEQUENCE_LENGTH, Row, direct
from tandem.engine.batcher import Batcher
from tandem.engine.engine import Engine
from tandem.engine.generator import Generator
from tandem.engine.generators import plain_generator
from tandem.engine.loading import Loaded
from tandem.runners.loading import CHUNK
from tandem.runners.protocol import Limits, VerifyRow
from tandem.runners.toy import VOCAB_SIZE, ToyRunner, ToyTokenizer
from tandem.speculation.types import GenerationEnd, GenerationRequest, Verdict

STEP_SECONDS = 0.003
TOKENS = 200
ROWS = (1, 4)


class SleepingRunner(ToyRunner):
    """A runner whose steps sleep. `idle`: the seconds between the end of a step and the beginning of the next."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self.idle: list[float] = []
        self._ended = 0.0

    def verify(self, rows: Sequence[VerifyRow]) -> list[Any]:
        self.idle.append(time.perf_counter() - self._ended)
        time.sleep(STEP_SECONDS)
        self._ended = time.perf_counter()
        return [Verdict((65,), 0) for _ in rows]


@dataclass(slots=True)
class Timed:
    """Times of one run, in seconds: the device's idle time before each step, and the process's CPU time per token."""

    idle: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


async def _one(generator: Generator) -> None:
    request = GenerationRequest(token_ids=(65, 66, 67), max_new_tokens=TOKENS, ignore_end_of_sequence=True)
    async for event in generator.generate(request):
        assert not isinstance(event, GenerationEnd) or event.output_tokens == TOKENS


async def _timed(into: Timed, runner: SleepingRunner, generator: Generator, rows: int) -> None:
    runner.idle.clear()
    cpu, wall = time.process_time(), time.perf_counter()
    await asyncio.gather(*(_one(generator) for _ in range(rows)))
    into.idle += runner.idle[1:]
    into.wall.append((time.perf_counter() - wall) / TOKENS)
    into.cpu.append((time.process_time() - cpu) / TOKENS / rows)


async def token_rows(repeats: int) -> list[Row]:
    """Times plain decoding with both ways to go on, in turn."""
    batcher = Batcher("benchmark")
    runner = SleepingRunner(Limits(max(ROWS), SEQUENCE_LENGTH, 0, CHUNK, VOCAB_SIZE))
    found = list[Row]()
    try:
        await batcher.on_device(runner.warm_up)
        generator = plain_generator(Loaded(Engine(runner, batcher), ToyTokenizer()))
        for rows in ROWS:
            asked, ahead = Timed(), Timed()
            for _ in range(repeats + 1):
                with patch("tandem.engine.run_ahead.MOST_AHEAD", 0):
                    await _timed(asked, runner, generator, rows)
                await _timed(ahead, runner, generator, rows)
            for name, timed in (("asked for each step", asked), ("device goes on", ahead)):
                over = 1 + quantile(timed.idle, 0.5) / STEP_SECONDS
                found += [
                    direct(f"{rows} at once, {name}: idle", timed.idle, f"between two steps: {over:.2f} of the step"),
                    direct(f"{rows} at once, {name}: wall", timed.wall, "of a step and all beside it"),
                    direct(f"{rows} at once, {name}: CPU", timed.cpu, "of the process, a token"),
                ]
    finally:
        await batcher.close()
    return found
