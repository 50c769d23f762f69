"""Measures milliseconds per step as module code and as graphs; modes take turns in one process.

    .venv/bin/python -m benchmarks.compiled_steps --modes off,inductor,native

A step is a verification of `width` tokens in `rows` slots, with one host copy; a round is a fused step of target and
draft. Each mode's own start (loading, compiling or reading graphs from disk, certifying) is timed as well: run it twice
to see both. Whether a mode's bits equal those of `off` is said, and whether it certified itself.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch

from benchmarks.arguments import Parser, positive
from tandem.checkpoints.gguf_cache import unpacked
from tandem.checkpoints.locate import embedded_draft, find
from tandem.runners.capabilities import No
from tandem.runners.fused_step import fused
from tandem.runners.loading import Execution, Shape, load_runner
from tandem.runners.native.runner import Logits, NativeRunner
from tandem.runners.protocol import FusedRow, FusedStep, PrefillRow, ProposeRow, VerifyRow
from tandem.runners.startup import Startup
from tandem.runners.torch.runner import TorchRunner
from tandem.speculation.types import Request

GREEDY = Request()
PREFIX = 96  # tokens in the cache


@dataclass
class Mode:
    """One loaded way to run the steps."""

    name: str
    target: TorchRunner | NativeRunner
    round: FusedStep | None
    startup: dict[str, float]
    notes: list[str]
    milliseconds: dict[str, list[float]] = field(default_factory=dict)

    def median(self, step: str) -> float:
        return statistics.median(self.milliseconds[step])


def load_mode(name: str, args: argparse.Namespace) -> Mode:
    """Loads the pair in this mode, warms it up and fills every slot with a prefix."""
    startup = Startup()
    execution = Execution(args.device, args.dtype, args.threads, name)
    shape = Shape(args.batch, 512, args.speculation_length)
    target = load_runner(unpacked(find(args.target_model)), execution, shape, startup=startup)
    target.warm_up(startup)
    draft_model = args.draft_model or embedded_draft()
    draft = None
    if draft_model is not None:
        draft = load_runner(unpacked(find(draft_model)), execution, shape, verifies=False, startup=startup)
        draft.warm_up(startup)
        if not isinstance(fuse := target.capabilities.fuse, No):
            fuse(draft, startup)
    assert isinstance(target, TorchRunner | NativeRunner)
    for slot in range(args.batch):
        for runner in (target, draft) if draft else (target,):
            for start in range(0, PREFIX, 64):
                runner.prefill([PrefillRow(slot, start, tuple(_tokens(start, min(64, PREFIX - start))))])
    taken = {k: round(v, 2) for k, v in startup.seconds.items()}
    return Mode(name, target, fused(target, draft) if draft else None, taken, startup.notes)


def _tokens(start: int, count: int) -> list[int]:
    return [(997 * i + 13) % 40000 for i in range(start, start + count)]


def verify_rows(rows: int, width: int) -> list[VerifyRow]:
    first, *draft = _tokens(PREFIX, width)
    return [VerifyRow(slot, PREFIX, first, tuple(draft), GREEDY) for slot in range(rows)]


def fused_rows(rows: int, k: int) -> list[FusedRow]:
    tail = tuple(_tokens(PREFIX - 1, 2))
    return [FusedRow(ProposeRow(slot, PREFIX, tail, k, GREEDY)) for slot in range(rows)]


def steps_of(args: argparse.Namespace) -> dict[str, Callable[[Mode], object]]:
    """Returns the timed functions by name."""
    steps: dict[str, Callable[[Mode], object]] = {}
    for rows in sorted({1, args.batch}):
        for width in args.widths:
            wanted = verify_rows(rows, width)
            steps[f"verify {rows} x {width}"] = lambda mode, wanted=wanted: mode.target.verify(wanted)  # type: ignore[misc]
        for k in sorted({3, args.speculation_length} if args.speculation_length >= 3 else {args.speculation_length}):
            round_ = fused_rows(rows, k)
            steps[f"round {rows} x {k}"] = lambda mode, round_=round_: (  # type: ignore[misc]
                mode.round and mode.round(round_)
            )
    return steps


def measure(modes: Sequence[Mode], steps: dict[str, Callable[[Mode], object]], runs: int) -> None:
    """Times all modes in turn; the order rotates."""
    for name, step in steps.items():
        for mode in modes:
            step(mode)
        for run in range(runs):
            for mode in (*modes[run % len(modes) :], *modes[: run % len(modes)]):
                began = time.perf_counter()
                step(mode)
                mode.milliseconds.setdefault(name, []).append(1000 * (time.perf_counter() - began))


def same_bits(one: Mode, other: Mode, rows: int, width: int) -> bool:
    wanted = verify_rows(rows, width)
    return np.array_equal(_logits(one, wanted, width), _logits(other, wanted, width))


def _logits(mode: Mode, wanted: Sequence[VerifyRow], width: int) -> Logits:
    """Returns logits float32 [rows, width, vocabulary] without a graph's padding rows and tokens."""
    logits = mode.target.verify_logits(wanted)
    if isinstance(logits, torch.Tensor):
        return logits[: len(wanted), :width].float().numpy()
    return np.stack(logits)


def show(modes: Sequence[Mode], args: argparse.Namespace) -> None:
    first = modes[0]
    for mode in modes:
        seconds = ", ".join(f"{name} {taken:.1f}" for name, taken in mode.startup.items())
        print(f"{mode.name}: start, seconds: {seconds}; certified bit-exact: {mode.target.shapes.bit_exact}")
        for note in mode.notes:
            print(f"    {note}")
    for mode in modes[1:]:
        equal = [same_bits(first, mode, rows, args.widths[-1]) for rows in sorted({1, args.batch})]
        print(f"{mode.name}: bits equal to those of {first.name}: {all(equal)}")
    print(f"\n{'ms, median (fastest)':20}" + "".join(f"{mode.name:>20}" for mode in modes) + f"{'ratio':>8}")
    for step in first.milliseconds:
        cells = "".join(f"{mode.median(step):>11.2f} ({min(mode.milliseconds[step]):6.2f})" for mode in modes)
        print(f"{step:20}{cells}{first.median(step) / modes[-1].median(step):>7.2f}x")
    print(f"\nratio: {first.name} / {modes[-1].name}, above 1 where the latter is faster")


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    p = Parser(prog="benchmarks.compiled_steps", description=__doc__.splitlines()[0])
    p.flag("--modes", default="off,inductor", help="values of --compile; the first is what others are compared with")
    p.flag("--target-model", help="default: the embedded one")
    p.flag("--draft-model", help="default: the one shipped")
    p.flag("--device", default="auto")
    p.flag("--dtype", default="auto")
    p.flag("--threads", type=positive)
    p.flag("--batch", type=positive, default=4)
    p.flag("--speculation-length", type=positive, default=5)
    p.flag("--widths", default="1,2,4,6", help="tokens per row of a verification")
    p.flag("--runs", type=positive, default=15)
    p.flag("--output", help="write every sample here as JSON")
    args = p.parse_args(argv)
    args.widths = [int(width) for width in args.widths.split(",")]
    if max(args.widths) > args.speculation_length + 1:
        p.error(f"widths: {max(args.widths)} is above speculation_length + 1 = {args.speculation_length + 1}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    modes = []
    for name in args.modes.split(","):
        try:
            modes.append(load_mode(name, args))
        except ValueError as error:
            print(f"{name}: left out: {error}", file=sys.stderr)
    if not modes:
        return 2
    measure(modes, steps_of(args), args.runs)
    if args.output:
        kept = [as_json(mode) for mode in modes]
        Path(args.output).write_text(json.dumps({"torch": torch.__version__, "modes": kept}, indent=1))
    show(modes, args)
    return 0


def as_json(mode: Mode) -> dict[str, object]:
    return {
        "name": mode.name,
        "startup_seconds": mode.startup,
        "notes": mode.notes,
        "shapes": asdict(mode.target.shapes),
        "milliseconds": mode.milliseconds,
    }


if __name__ == "__main__":
    sys.exit(main())
