"""Measures what reused prefixes save and what keeping them costs: `python -m benchmarks.prefixes`.

One target answers through two engines in turn, one of which keeps prefixes. Prompts of 400 tokens begin with the same
tokens (all but the last few), or with nothing in common, and the memory for prefixes is full from the first on, so that
pages are replaced in every request: the unfavourable case. Time to first token and the time of the whole answer are
compared in pairs of neighbours, whose order changes from run to run; and the processor seconds of the answer, which
other programs on the machine change least (use one thread for them: idle threads spin).
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.arguments import Parser, positive
from benchmarks.keeping import kept
from tandem.engine.batcher import Batcher
from tandem.engine.engine import Engine
from tandem.engine.loading import load
from tandem.engine.model_config import ModelConfig
from tandem.engine.prefix_cache import PrefixSharing, share_prefixes
from tandem.engine.sequences import LocalVerifier
from tandem.runners.loading import Execution, Shape
from tandem.speculation.types import Request

SHARED_BAR, UNSHARED_BAR = 0.15, 1.01
"""Limits of the ratio of times with kept prefixes to those without: of TTFT where a prefix is shared, of any else."""
OWN = 16
"""Tokens at the end of each prompt that no other has."""


@dataclass(frozen=True)
class Settings:
    """The settings of one run."""

    runs: int
    prompt_tokens: int
    new_tokens: int
    threads: int | None
    dtype: str
    megabytes: int
    output: Path


@dataclass
class Outcome:
    """Seconds without and with kept prefixes, in pairs in the order measured; `same`: pairs with the same tokens."""

    first: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: {"shared": [], "unshared": []})
    whole: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: {"shared": [], "unshared": []})
    processor: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: {"shared": [], "unshared": []})
    same: int = 0
    asked: int = 0


def ratio(pairs: Sequence[tuple[float, float]]) -> float:
    """The median over pairs of the time with kept prefixes over the time without."""
    return statistics.median(with_them / without for without, with_them in pairs)


async def answered(engine: Engine, prompt: Sequence[int], count: int) -> tuple[tuple[int, ...], float, float, float]:
    """The tokens of an answer, the seconds to its first token and to its end (it closes), and processor seconds."""
    verifier, tokens, first = LocalVerifier(engine, Request()), list(prompt), 0.0
    cpu, began = time.process_time(), time.perf_counter()
    await verifier.open(tokens)
    while len(tokens) < len(prompt) + count:
        tokens += (await verifier.verify(tokens, ())).token_ids
        first = first or time.perf_counter() - began
    await verifier.close()
    await engine.batcher.on_device(int)
    return tuple(tokens), first, time.perf_counter() - began, time.process_time() - cpu


async def measure(settings: Settings, outcome: Outcome) -> None:
    batcher, chance = Batcher("benchmark"), random.Random(7)
    execution = Execution(threads=settings.threads, dtype=settings.dtype)
    shape = Shape(2, settings.prompt_tokens + settings.new_tokens + 8, 4)
    without = (await load(ModelConfig(execution, shape), batcher)).engine
    keeping = Engine(without.runner, batcher)
    await share_prefixes([keeping], PrefixSharing("all", settings.megabytes), lambda: None)
    size = without.runner.limits.vocab_size

    def some(count: int) -> list[int]:
        return [chance.randrange(size) for _ in range(count)]

    same = some(settings.prompt_tokens - OWN)
    assert keeping.prefixes is not None, "this runner cannot copy pages"
    while keeping.prefixes.used_bytes < 0.99 * keeping.prefixes.limit_bytes:
        await answered(keeping, some(settings.prompt_tokens), 1)
    await answered(keeping, [*same, *some(OWN)], 2)
    for run in range(settings.runs + 1):  # the first one warms up
        for kind, begins in (("shared", same), ("unshared", some(settings.prompt_tokens - OWN))):
            prompt = [*begins, *some(OWN)]
            times = {}
            for engine in (without, keeping) if run % 2 else (keeping, without):
                times[engine] = await answered(engine, prompt, settings.new_tokens)
            outcome.asked += 1
            outcome.same += times[without][0] == times[keeping][0]
            if run:
                outcome.first[kind].append((times[without][1], times[keeping][1]))
                outcome.whole[kind].append((times[without][2], times[keeping][2]))
                outcome.processor[kind].append((times[without][3], times[keeping][3]))
    await batcher.close()


def report(outcome: Outcome) -> list[str]:
    lines = []
    for kind, bar in (("shared", SHARED_BAR), ("unshared", UNSHARED_BAR)):
        for title, pairs in (
            ("time to first token", outcome.first[kind]),
            ("whole answer", outcome.whole[kind]),
            ("processor time", outcome.processor[kind]),
        ):
            if not pairs:
                continue
            found = ratio(pairs)
            without, keeping = (1000 * statistics.median(each) for each in zip(*pairs, strict=True))
            line = f"{kind:9} {title:20} {without:8.1f} ms without, {keeping:8.1f} ms with: ratio {found:.3f}"
            if kind == "unshared" or title == "time to first token":
                line += f" ({'within' if found <= bar else 'ABOVE'} the bar of {bar:.2f})"
            lines.append(line)
    return [*lines, f"same tokens with and without: {outcome.same}/{outcome.asked}"]


def parse(argv: Sequence[str] | None = None) -> Settings:
    parser = Parser(prog="prefixes", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.flag("--runs", type=positive, default=12, metavar="N", help="pairs of each kind (default: 12)")
    parser.flag("--prompt-tokens", type=positive, default=400, metavar="N", help="(default: 400)")
    parser.flag("--new-tokens", type=positive, default=16, metavar="N", help="of each answer (default: 16)")
    parser.flag("--threads", type=positive, metavar="N", help="threads of a step (default: torch's choice)")
    parser.flag("--dtype", default="auto", help="(default: auto)")
    parser.flag("--megabytes", type=positive, default=64, metavar="N", help="memory for prefixes (default: 64)")
    parser.flag("--output", type=Path, default=Path("results/prefixes.json"), help="(default: %(default)s)")
    return Settings(**vars(parser.parse_args(argv)))


def main(argv: Sequence[str] | None = None) -> int:
    settings, outcome = parse(argv), Outcome()
    document = lambda: {"settings": asdict(settings), "measured": asdict(outcome), "report": report(outcome)}  # noqa: E731
    with kept(settings.output, document, lambda: asdict(outcome)):
        asyncio.run(measure(settings, outcome))
    print("\n".join(report(outcome)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
