"""Measures what a sampled token's draw costs in the native library, and what sampling adds to a fused round.

    .venv/bin/python -m benchmarks.draws --against ../main/tandem/runners/native

Draws are from the embedded target's logits behind the tokens of a text, one after the other. A round is that of the
embedded pair after some tokens of it, greedy and sampled in turn. Figures are the least of all runs, so that other
programs on the machine count little. With `--against`, the sources of another checkout are timed in turn with these,
in the same process.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from ctypes import byref, c_float
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.arguments import Parser, positive
from benchmarks.keeping import kept
from benchmarks.others import watch
from benchmarks.products import BEFORE, HERE, built
from benchmarks.quantised import held_out
from tandem.checkpoints.gguf_cache import unpacked
from tandem.checkpoints.locate import embedded_draft, find
from tandem.runners.fused_step import fused
from tandem.runners.loading import Execution, Shape, load_runner
from tandem.runners.native import build
from tandem.runners.native.library import Sampling, load_library, pointer, zeros
from tandem.runners.native.runner import NativeRunner
from tandem.runners.native.steps import Threads
from tandem.runners.protocol import FusedResult, FusedRow, ProposeRow
from tandem.speculation.types import Request, SamplingParams

AGAIN = "temperature, again"
KINDS = {
    "temperature": SamplingParams(temperature=0.8, seed=7),
    AGAIN: SamplingParams(temperature=0.8, seed=7),
    "top_p": SamplingParams(temperature=0.8, top_p=0.9, seed=7),
    "top_p 0.99": SamplingParams(temperature=1.0, top_p=0.99, seed=7),
    "top_k": SamplingParams(temperature=0.8, top_k=50, seed=7),
    "top_k, top_p": SamplingParams(temperature=0.8, top_k=50, top_p=0.9, seed=7),
    "min_p": SamplingParams(temperature=0.8, min_p=0.05, seed=7),
}
IN_ROUNDS = ("greedy", "temperature", "top_p", "top_k")
KEPT = 64
"""Positions whose noise the library keeps: a seed that is so much higher takes their places."""
GREEDY, CHUNK, PREFIX, TEXT = "greedy", 64, 64, 128
"""A round's name without sampling; the tokens of a prefill step, before the first round, and of the text."""


@dataclass
class Outcome:
    """`draws`: least mean ns of a draw, `rounds`: least mean ms of a round, by version and kind (and draft tokens)."""

    draws: dict[str, dict[str, float]] = field(default_factory=dict)
    rounds: dict[str, dict[str, float]] = field(default_factory=dict)
    busy: float | None = None


def text_tokens(count: int) -> list[int]:
    from tokenizers import Tokenizer

    text = held_out(None)
    tokenizer = Tokenizer.from_file(str(Path(embedded_draft() or "") / "tokenizer.json"))
    return list(tokenizer.encode(text).ids[:count])


def load(model: str | None, threads: int, verifies: bool) -> NativeRunner:
    shape = Shape(1, 2 * TEXT, 4, CHUNK)
    runner = load_runner(unpacked(find(model)), Execution(threads=threads), shape, verifies=verifies)
    assert isinstance(runner, NativeRunner)
    return runner


def fill(runner: NativeRunner, tokens: Sequence[int]) -> np.ndarray:
    """Feeds the text. Returns the logits behind each token, float32 [tokens, outputs]."""
    parts = [runner.model.feed([0], [i], [tokens[i : i + CHUNK]]) for i in range(0, len(tokens), CHUNK)]
    return np.concatenate([part for part in parts if part is not None])


def clock(threads: int) -> Callable[[], float]:
    """Seconds: of one thread the processor's, which other programs change least."""
    return time.thread_time if threads == 1 else time.perf_counter


def forget(pool: Threads, by: SamplingParams, first: int, count: int) -> None:
    """Makes the library forget the noise of `count` positions, as if they had not been drawn."""
    logits, token = np.zeros(64, dtype=np.float32), zeros(1)
    for position in range(first, first + count):
        other = Sampling(1.0, 1.0, 0.0, by.seed + KEPT, position, 0, len(logits))
        pool.library.tandem_draw(pool.handle, pointer(logits, c_float), len(logits), None, byref(other), token)


def draws_of(library: Any, threads: int, logits: np.ndarray) -> dict[str, Callable[[], float]]:
    """What draws once from all rows of logits, by kind; returns the ns of a draw."""
    pool, token, rows = Threads(library, threads), zeros(1), [pointer(row, c_float) for row in logits]
    outputs, now = logits.shape[1], clock(threads)

    def one(kind: str, by: SamplingParams) -> Callable[[], float]:
        asked = [Sampling(by.temperature, by.top_p, by.min_p, by.seed, i, by.top_k, outputs) for i in range(len(rows))]
        calls = [(row, byref(how)) for row, how in zip(rows, asked, strict=True)]

        def run() -> float:
            if kind != AGAIN:
                forget(pool, by, 0, len(calls))
            draw, handle, began = library.tandem_draw, pool.handle, now()
            for row, how in calls:
                draw(handle, row, outputs, None, how, token)
            return 1e9 * (now() - began) / len(calls)

        return run

    return {kind: one(kind, by) for kind, by in KINDS.items()}


def rounds_of(
    target: NativeRunner, draft: NativeRunner, threads: int, tokens: Sequence[int]
) -> dict[str, Callable[[], list[float]]]:
    """What runs one round after each of some prefixes, by kind and draft tokens; returns the ms of each."""
    step, now = fused(target, draft), clock(threads)

    def one(by: SamplingParams, k: int) -> Callable[[], list[float]]:
        ends = range(PREFIX, TEXT - 8, 8)
        rows = [ProposeRow(0, end - 1, tuple(tokens[end - 2 : end]), k, Request(by)) for end in ends]

        def run() -> list[float]:
            taken = []
            for row in rows:
                forget(target.model.threads, by, row.position, k + 2)
                began = now()
                (result,) = step([FusedRow(row)])
                taken.append(1000 * (now() - began))
                assert isinstance(result, FusedResult)
            return taken

        return run

    sampled = {GREEDY: SamplingParams(), **KINDS}
    return {f"{kind}, k={k}": one(sampled[kind], k) for k in (3, 4) for kind in IN_ROUNDS}


def measure(args: argparse.Namespace, outcome: Outcome) -> None:
    versions = {HERE: build.SOURCES} | ({BEFORE: args.against.resolve()} if args.against else {})
    tokens, draws, rounds = text_tokens(TEXT), {}, {}
    for name, sources in versions.items():
        library = load_library(built(sources))
        target, draft = load(None, args.threads, True), load(embedded_draft(), args.threads, False)
        fill(draft, tokens)
        draws[name] = draws_of(library, args.threads, fill(target, tokens)[PREFIX:])
        rounds[name] = rounds_of(target, draft, args.threads, tokens)
    least: dict[tuple[str, str], np.ndarray] = {}
    for run in range(args.runs):
        for name in sorted(versions, reverse=bool(run % 2)):
            for kind, draw in draws[name].items() if "draws" in args.parts else ():
                found = outcome.draws.setdefault(name, {})
                found[kind] = min(draw(), found.get(kind, float("inf")))
            for kind, round_ in rounds[name].items() if "rounds" in args.parts else ():
                least[name, kind] = np.minimum(round_(), least.get((name, kind), np.inf))
                outcome.rounds.setdefault(name, {})[kind] = float(least[name, kind].mean())


def report(outcome: Outcome) -> list[str]:
    lines = []
    for name, draws in outcome.draws.items():
        lines += [f"{name:8} draw  {kind:16} {ns / 1000:8.1f} us" for kind, ns in draws.items()]
    for name, rounds in outcome.rounds.items():
        for kind, ms in rounds.items():
            over = ms / rounds[f"{GREEDY}, {kind.split(', ')[-1]}"]
            lines.append(f"{name:8} round {kind:16} {ms:8.3f} ms, over greedy {over:.3f}")
    busy = "?" if outcome.busy is None else f"{outcome.busy:.0%}"
    return [*lines, f"least of all runs; before it began, {busy} of the machine was busy with other work"]


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    p = Parser(prog="benchmarks.draws", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.flag("--against", type=Path, metavar="FOLDER", help="tandem/runners/native of another checkout")
    p.flag("--threads", type=positive, default=2, metavar="N", help="(default: 2)")
    p.flag("--parts", default="draws,rounds", help="(default: %(default)s)")
    p.flag("--runs", type=positive, default=20, metavar="N", help="times everything is run (default: 20)")
    p.flag("--output", type=Path, default=Path("results/draws.json"), help="(default: %(default)s)")
    args = p.parse_args(argv)
    args.parts = args.parts.split(",")
    if args.against is not None and not (args.against / "api.cpp").is_file():
        p.error(f"against: {args.against} has no api.cpp")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args, outcome = parse(argv), Outcome()
    settings = json.loads(json.dumps(vars(args), default=str))
    document = lambda: {"settings": settings, **asdict(outcome)}  # noqa: E731
    with kept(args.output, document, lambda: asdict(outcome)):
        outcome.busy = watch()
        measure(args, outcome)
    print("\n".join(report(outcome)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
