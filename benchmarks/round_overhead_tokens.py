"""Times what a plain step or a fused round costs beside its own time, for benchmarks/round_overhead.py.

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
from tandem.engine.generators import fused_generator, plain_generator
from tandem.engine.loading import Loaded
from tandem.engine.model_config import DraftChoice
from tandem.runners.loading import CHUNK
from tandem.runners.protocol import Limits, Proposal, ProposeRow, VerifyRow
from tandem.runners.toy import VOCAB_SIZE, ToyRunner, ToyTokenizer
from tandem.speculation.types import GenerationEnd, GenerationRequest, Verdict

STEP_SECONDS = 0.003
TOKENS = 200
ROWS = (1, 4)
DRAFTED = 3


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
        return [Verdict((65,) * (1 + len(row.draft)), len(row.draft)) for row in rows]

    def propose(self, rows: Sequence[ProposeRow]) -> list[Any]:
        return [Proposal((65,) * row.k) for row in rows]


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


async def _timed(into: Timed, runner: SleepingRunner, generator: Generator, rows: int, a_step: int) -> None:
    """Times one run; a step commits `a_step` tokens of a row."""
    runner.idle.clear()
    cpu, wall = time.process_time(), time.perf_counter()
    await asyncio.gather(*(_one(generator) for _ in range(rows)))
    into.idle += runner.idle[1:]
    into.wall.append((time.perf_counter() - wall) * a_step / TOKENS)
    into.cpu.append((time.process_time() - cpu) * a_step / TOKENS / rows)


async def token_rows(repeats: int) -> list[Row]:
    """Times plain decoding, and fused rounds whose drafts are all right, with both ways to go on, in turn."""
    batcher = Batcher("benchmark")
    limits = Limits(max(ROWS), SEQUENCE_LENGTH, DRAFTED, CHUNK, VOCAB_SIZE)
    runner = SleepingRunner(limits)
    target, draft = (Loaded(Engine(each, batcher), ToyTokenizer()) for each in (runner, SleepingRunner(limits)))
    fused = fused_generator(target, draft, DRAFTED, DraftChoice("hybrid", "toy"))
    found = list[Row]()
    try:
        for kind, generator, a_step in (("plain", plain_generator(target), 1), ("fused", fused, 1 + DRAFTED)):
            for rows in ROWS:
                asked, ahead = Timed(), Timed()
                for _ in range(repeats + 1):
                    with patch("tandem.engine.stepper.MOST_AHEAD", 0):
                        await _timed(asked, runner, generator, rows, a_step)
                    await _timed(ahead, runner, generator, rows, a_step)
                for name, timed in (("asked for each step", asked), ("device goes on", ahead)):
                    over, what = 1 + quantile(timed.idle, 0.5) / STEP_SECONDS, f"{kind}, {rows} at once, {name}"
                    found += [
                        direct(f"{what}: idle", timed.idle, f"between two steps: {over:.2f} of the step"),
                        direct(f"{what}: wall", timed.wall, "of a step and all beside it"),
                        direct(f"{what}: CPU", timed.cpu, "of the process, a step of one row"),
                    ]
    finally:
        await batcher.close()
    return found
