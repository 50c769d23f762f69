"""Counts the functions that a distributed round enters on its worker: `python -m benchmarks.round_frames`.

A generator with a toy draft runs in this process, and its target in another, whose steps take long enough that one
round is in flight. What the event loop's thread enters between two chunks belongs to one round, from its draft to what
it committed: rounds overlap, but each does each part once. A coroutine that waits is entered again when it goes on.
Functions that pass control on, because they enter others of ours or wait, are frames; the others are their helpers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from benchmarks.arguments import Parser, positive
from benchmarks.round_overhead import target_server
from tandem.clients.distributed import connect_distributed
from tandem.engine.batcher import Batcher
from tandem.engine.drafting import load_drafting
from tandem.engine.model_config import DraftChoice, ModelConfig
from tandem.runners.loading import Shape
from tandem.speculation.depth import Pipeline
from tandem.speculation.types import Chunk, GenerationRequest

TARGET = ("--backend", "toy", "--target_model", "step=0.1")
WARM_UP_ROUNDS = 8
ROOT = Path(__file__).resolve().parents[1]
ROOMS = tuple(str(ROOT / room) + "/" for room in ("tandem", "services", "clients"))
INLINED = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
"""Comprehensions are part of their function, as they are to Python from 3.12 on."""


def is_coroutine(code: CodeType) -> bool:
    return bool(code.co_flags & (CO_COROUTINE | CO_ASYNC_GENERATOR))


class Entered:
    """The functions of Tandem that this thread entered, and how often. `passing`: those that pass control on."""

    def __init__(self) -> None:
        self.counts: Counter[CodeType] = Counter()
        self.passing: set[CodeType] = set()

    def take(self) -> Counter[CodeType]:
        """Returns the counts since the last call."""
        counts, self.counts = self.counts, Counter()
        return counts

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, about: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROOMS) and code.co_name not in INLINED:
            self.counts[code] += 1
            if frame.f_back:
                self.passing.add(frame.f_back.f_code)
            if is_coroutine(code):
                self.passing.add(code)


async def rounds(entered: Entered, pipeline: Pipeline, draft: str, count: int) -> list[Counter[CodeType]]:
    """Returns what each of `count` rounds entered."""
    found, batcher = list[Counter[CodeType]](), Batcher("draft")
    config = ModelConfig(backend="toy", draft=DraftChoice(draft, "miss=0.2,step=0.001"), shape=Shape(max_length=1024))
    async with target_server("toy", config.shape.max_draft, *TARGET) as (address, _):
        drafting = await load_drafting(config, batcher)
        generator, client = await connect_distributed(drafting, config, address, 30.0, pipeline)
        request = GenerationRequest(
            text="A round of a draft and a target", max_new_tokens=400, ignore_end_of_sequence=True
        )
        try:
            with entered.counting():
                async with contextlib.aclosing(generator.generate(request)) as events:
                    async for event in events:
                        found.append(entered.take())
                        if not isinstance(event, Chunk) or len(found) == WARM_UP_ROUNDS + count:
                            break
        finally:
            await client.close()
            await batcher.close()
    return found[WARM_UP_ROUNDS : WARM_UP_ROUNDS + count]


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(prog="round_frames", description=__doc__, allow_abbrev=False)
    parser.flag("--rounds", type=positive, default=40, metavar="N", help="(default: 40)")
    parser.flag("--pipeline", type=Pipeline, choices=list(Pipeline), default=Pipeline.AUTO)
    parser.flag("--draft", choices=("hybrid", "model"), default="hybrid")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    entered = Entered()
    found = asyncio.run(rounds(entered, args.pipeline, args.draft, args.rounds))
    usual = [code for code in set().union(*found) if 2 * sum(code in each for each in found) >= len(found)]
    for code in sorted(usual, key=lambda code: (code.co_filename, code.co_firstlineno)):
        where = f"{Path(code.co_filename).relative_to(ROOT)}:{code.co_firstlineno}"
        times, mark = statistics.median(each[code] for each in found), "*" if code in entered.passing else " "
        print(f"{times:4.0f} {mark} {code.co_qualname:48} {where}")
    kinds = ("functions", set(usual)), ("frames (*)", entered.passing), ("coroutines", set(filter(is_coroutine, usual)))
    counts = {name: statistics.median(len(kind & each.keys()) for each in found) for name, kind in kinds}
    print(f"{', '.join(f'{count:.0f} {name}' for name, count in counts.items())}; medians of {len(found)} rounds")
    return 0


if __name__ == "__main__":
    sys.exit(main())
