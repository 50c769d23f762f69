"""Compares formats of weights in native steps: what each costs in quality, and what it saves in time.

    .venv/bin/python -m benchmarks.quantised

Quality, on the same known text: perplexity, mean divergence (KL) of the next token's distribution from bfloat16's and
float32's, agreement of the most probable token. Speed: steps of all formats in turn, in one process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks.arguments import Parser, positive
from benchmarks.keeping import kept
from benchmarks.others import watch
from benchmarks.peak import Meter, Peaks, multiply_adds
from tandem.checkpoints.gguf_cache import unpacked
from tandem.checkpoints.locate import find
from tandem.checkpoints.tokenizers import HuggingFaceTokenizer
from tandem.runners.load_runner import Execution, Shape, load_runner
from tandem.runners.native.native_runner import NativeRunner
from tandem.runners.native.steps import TileState, use_tiles

FORMATS = ("float32", "bfloat16", "int8", "q4", "as-stored")
BASE = "bfloat16"  # others are compared with it
REFERENCES = (BASE, "float32")
CHUNK, PREFIX = 64, 128
WIDTHS = (1, 4, 8, 64)
PEAKS = 50  # measurements of the peak before steps of a width
Logits = NDArray[np.float32]


@dataclass
class Quality:
    """A format's reading of the text."""

    tokens: int
    perplexity: float
    divergence: dict[str, float]  # mean KL from each reference
    worst: dict[str, float]  # its 99th percentile
    agreement: dict[str, float]


@dataclass
class Outcome:
    """Measurements by format."""

    names: dict[str, str] = field(default_factory=dict)
    weight_bytes: dict[str, int] = field(default_factory=dict)
    load_seconds: dict[str, float] = field(default_factory=dict)
    quality: dict[str, Quality] = field(default_factory=dict)
    milliseconds: dict[str, dict[int, list[float]]] = field(default_factory=dict)  # of steps of each width
    peaks: Peaks = field(default_factory=Peaks)
    threads: int = 1
    multiply_adds: dict[int, int] = field(default_factory=dict)  # of a step of each width
    busy: float | None = None


def held_out(file: Path | None) -> str:
    """Returns the file's text, else English prose that every Python brings: its language reference."""
    if file is not None:
        return file.read_text(encoding="utf-8")
    from pydoc_data import topics

    return "\n\n".join(topics.topics[name] for name in ("assignment", "class", "exceptions", "import", "with", "async"))


def load(form: str, args: argparse.Namespace) -> NativeRunner:
    """Loads the model; `form`: a value of --weights, with /dtype if unusual."""
    weights, _, dtype = form.partition("/")
    execution = Execution("cpu", dtype or "auto", args.threads, "native", weights=weights)
    runner = load_runner(unpacked(find(args.model)), execution, Shape(1, PREFIX + max(args.window, CHUNK), 7, CHUNK))
    assert isinstance(runner, NativeRunner)
    return runner


def logits_of(runner: NativeRunner, windows: Sequence[Sequence[int]]) -> Logits:
    """Returns logits float32 [tokens, vocabulary] behind every token, window by window."""
    parts = []
    for window in windows:
        for start in range(0, len(window), CHUNK):
            logits = runner.model.feed([0], [start], [window[start : start + CHUNK]])
            assert logits is not None
            parts.append(logits)
    return np.concatenate(parts)


def log_softmax(logits: Logits) -> NDArray[np.float64]:
    wide = logits.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(-1, keepdims=True))


def divergences(reference: Logits, other: Logits) -> NDArray[np.float64]:
    """Returns KL(reference || other) [tokens], in nats."""
    found = []
    for begin in range(0, len(reference), CHUNK):
        p, q = log_softmax(reference[begin : begin + CHUNK]), log_softmax(other[begin : begin + CHUNK])
        found.append((np.exp(p) * (p - q)).sum(-1))
    return np.concatenate(found)


def perplexity(logits: Logits, windows: Sequence[Sequence[int]]) -> float:
    costs, begin = [], 0
    for window in windows:
        said = log_softmax(logits[begin : begin + len(window) - 1])
        costs += [-said[i, token] for i, token in enumerate(window[1:])]
        begin += len(window)
    return float(np.exp(statistics.fmean(costs)))


def judge(logits: Logits, references: dict[str, Logits], windows: Sequence[Sequence[int]]) -> Quality:
    found = {name: divergences(reference, logits) for name, reference in references.items()}
    return Quality(
        tokens=len(logits),
        perplexity=perplexity(logits, windows),
        divergence={name: float(each.mean()) for name, each in found.items()},
        worst={name: float(np.quantile(each, 0.99)) for name, each in found.items()},
        agreement={
            name: float((reference.argmax(-1) == logits.argmax(-1)).mean()) for name, reference in references.items()
        },
    )


def measure_quality(args: argparse.Namespace, outcome: Outcome) -> None:
    tokens = HuggingFaceTokenizer(unpacked(find(args.model))).encode(held_out(args.text), chat=False)[: args.tokens]
    windows = [tokens[i : i + args.window] for i in range(0, len(tokens) - 1, args.window)]
    references = {name: logits_of(load(name, args), windows) for name in REFERENCES}
    for form in args.formats:
        logits = references[form] if form in references else logits_of(load(form, args), windows)
        outcome.quality[form] = judge(logits, references, windows)
        _say(f"{form}: read {len(logits)} tokens")


def measure_speed(runners: dict[str, NativeRunner], runs: int, outcome: Outcome) -> None:
    """Times steps of every width behind a prefix, formats in turn; the first place rotates."""
    tokens = [(997 * i + 13) % 40000 for i in range(PREFIX + CHUNK)]
    for runner in runners.values():
        for start in range(0, PREFIX, CHUNK):
            runner.model.feed([0], [start], [tokens[start : start + CHUNK]], 0)
    names = list(runners)
    meter = Meter(use_tiles(runners[names[0]].model.library) == TileState.USED)
    for width in WIDTHS:
        outcome.peaks = meter.measure(PEAKS)
        outcome.multiply_adds[width] = multiply_adds(
            runners[names[0]].model.sizes, width, 1 if width == CHUNK else width
        )
        for run in range(-1, runs):  # the first turn is not counted
            for name in (*names[run % len(names) :], *names[: run % len(names)]):
                began = time.perf_counter()
                runners[name].model.feed([0], [PREFIX], [tokens[PREFIX : PREFIX + width]], 1 if width == CHUNK else 2)
                taken = 1000 * (time.perf_counter() - began)
                if run >= 0:
                    outcome.milliseconds.setdefault(name, {}).setdefault(width, []).append(taken)


def report(outcome: Outcome, console: Console) -> None:
    if outcome.quality:
        table = Table(title=f"Quality, {next(iter(outcome.quality.values())).tokens} tokens of held-out text")
        for column in (
            "weights",
            "perplexity",
            *(f"{what} {r}" for r in REFERENCES for what in ("KL", "99 %", "same")),
        ):
            table.add_column(column, justify="left" if column == "weights" else "right")
        for form, q in outcome.quality.items():
            figures = [(f"{q.divergence[r]:.5f}", f"{q.worst[r]:.4f}", f"{q.agreement[r]:.2%}") for r in REFERENCES]
            table.add_row(form, f"{q.perplexity:.3f}", *(figure for three in figures for figure in three))
        console.print(table)
        console.print("KL: mean of KL(reference || format) in nats; same: share of tokens whose greedy choice agrees")
    if outcome.milliseconds:
        table = Table(title=f"Milliseconds a step, median (and {BASE}'s time over it)")
        for column in ("weights", "runs as", "load, s", "MB", "GB/s", *(f"{width} tokens" for width in WIDTHS)):
            table.add_column(column, justify="left" if column == "weights" else "right")
        for form, taken in outcome.milliseconds.items():
            medians = {width: statistics.median(each) for width, each in taken.items()}
            base = {w: statistics.median(each) for w, each in outcome.milliseconds.get(BASE, {}).items()}
            cells = [f"{m:.2f}" + (f" ({base[w] / m:.2f})" if base else "") for w, m in medians.items()]
            size = outcome.weight_bytes[form]
            rate = size / medians[1] / 1e6
            loaded = f"{outcome.load_seconds[form]:.1f}"
            table.add_row(form, outcome.names[form], loaded, f"{size / 1e6:.0f}", f"{rate:.1f}", *cells)
        console.print(table)
    for form in outcome.milliseconds if outcome.peaks.registers.rate else ():
        if form in REFERENCES:
            continue
        shares = ", ".join(f"{width} tokens {_share(outcome, form, width):.0%}" for width in WIDTHS)
        console.print(f"{form}: share of the peak of {outcome.threads} threads: {shares}")
    if outcome.peaks.registers.rate:
        console.print(f"the peak of a thread: {outcome.peaks}")
    if outcome.busy is not None:
        console.print(f"before the steps were timed, {outcome.busy:.0%} of the machine was busy with other work")


def _share(outcome: Outcome, form: str, width: int) -> float:
    """Returns the share of all threads' peak reached by a step's products of weights."""
    rate = outcome.multiply_adds[width] / (statistics.median(outcome.milliseconds[form][width]) / 1000)
    return outcome.peaks.of(width).share(rate / outcome.threads) or 0.0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    p = Parser(prog="benchmarks.quantised", description=(__doc__ or "").splitlines()[0])
    p.flag("--formats", default=",".join(FORMATS), help="values of --weights, WEIGHTS/DTYPE for another dtype")
    p.flag("--parts", default="quality,speed", help="(default: %(default)s)")
    p.flag("--model", help="default: the embedded one")
    p.flag("--text", type=Path, help="held-out text (default: pages of Python's reference)")
    p.flag("--tokens", type=positive, default=2048, help="of the text (default: %(default)s)")
    p.flag("--window", type=positive, default=512, help="tokens read together (default: %(default)s)")
    p.flag("--threads", type=positive, default=len(os.sched_getaffinity(0)), help="(default: the processors)")
    p.flag("--runs", type=positive, default=25, help="times each step is run (default: %(default)s)")
    p.flag("--output", type=Path, default=Path("results/quantised.json"), help="(default: %(default)s)")
    args = p.parse_args(argv)
    args.formats, args.parts = args.formats.split(","), args.parts.split(",")
    if unknown := set(args.parts) - {"quality", "speed"}:
        p.error(f"parts: {unknown.pop()!r} is neither quality nor speed")
    return args


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measure(args: argparse.Namespace, outcome: Outcome) -> None:
    if "quality" in args.parts:
        measure_quality(args, outcome)
    if "speed" in args.parts:
        runners = {}
        for form in args.formats:
            began = time.perf_counter()
            runners[form] = runner = load(form, args)
            outcome.load_seconds[form] = time.perf_counter() - began
            outcome.names[form], outcome.weight_bytes[form] = runner.identity.dtype, runner.model.weight_bytes
        outcome.busy, outcome.threads = watch(), args.threads
        measure_speed(runners, args.runs, outcome)


def main(argv: Sequence[str] | None = None) -> int:
    args, outcome = parse(argv), Outcome()
    settings = json.loads(json.dumps(vars(args), default=str))
    with kept(args.output, lambda: {"settings": settings, **asdict(outcome)}, lambda: asdict(outcome)):
        measure(args, outcome)
    report(outcome, Console() if sys.stdout.isatty() else Console(width=150))
    print(f"wrote {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
