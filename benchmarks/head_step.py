"""Measures an EAGLE-3 head's steps in C++ beside its module code and the shipped draft's, in turn in one process.

    .venv/bin/python -m benchmarks.head_step [--shapes 1024x8192,1536x4096] [--formats auto,bfloat16] [--head HEAD]

Heads are random, INTERMEDIATExVOCABULARY with the target's other sizes, unless --head names a trained one. What a step
costs does not depend on that; how many drafts are accepted does, and is not measured here.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from benchmarks.arguments import Parser, positive
from tandem.checkpoints.gguf_cache import unpacked
from tandem.checkpoints.head_config import HeadConfig, default_layers
from tandem.checkpoints.locate import embedded_draft, find
from tandem.runners.eagle.files import read_head, weights_of
from tandem.runners.eagle.hidden_states import of_native
from tandem.runners.eagle.module import EagleHead
from tandem.runners.eagle.runner import EagleRunner
from tandem.runners.fused_step import fused
from tandem.runners.loading import Execution, Shape, load_runner
from tandem.runners.native.features import NativeFeatures
from tandem.runners.native.load_head import load_native_head
from tandem.runners.native.runner import NativeRunner
from tandem.runners.protocol import FusedResult, FusedRow, PrefillRow, ProposeRow, Runner, VerifyRow
from tandem.runners.torch.platforms import platform_of
from tandem.speculation.types import Request

GREEDY = Request()
PREFIX, CHUNK = 192, 64  # tokens in the cache, and of a prefill step
WARM = 3  # runs that do not count
MODULE, DRAFT = "module code", "shipped draft"
STATISTICS: dict[str, Callable[[list[float]], float]] = {"median": statistics.median, "fastest": min}
FORMATS = ("auto", "float32", "bfloat16", "int8", "q4")


@dataclass
class Contender:
    """A draft beside the target. `milliseconds`: of each run, by what was timed."""

    name: str
    runner: Runner
    milliseconds: dict[str, list[float]] = field(default_factory=dict)

    @property
    def megabytes(self) -> float | None:
        return self.runner.model.weight_bytes / 1e6 if isinstance(self.runner, NativeRunner) else None

    def figures(self, of: Callable[[list[float]], float], k: int) -> dict[str, float]:
        """Milliseconds, `of` those of all runs; "next" is what each draft token after the first takes."""
        found = {what: of(taken) for what, taken in self.milliseconds.items()}
        return {
            **found,
            "next": (found["draft"] - found["first"]) / (k - 1),
            "rest": found["round"] - found["drafting"],
        }


def execution_of(name: str, threads: int | None) -> Execution:
    """Returns how models run in the format that a server's flags call `name`."""
    if name in ("float32", "bfloat16"):
        return Execution(dtype=name, threads=threads)
    return Execution(weights=name, threads=threads)


def random_head(target: NativeRunner, shape: str) -> EagleHead:
    """A head of INTERMEDIATExVOCABULARY for the target."""
    intermediate, vocabulary = (int(part) for part in shape.split("x"))
    own = target.model.sizes
    torch.manual_seed(0)
    hidden, heads = int(own.hidden), (int(own.heads), int(own.kv_heads), int(own.head_dim))
    config = HeadConfig(hidden, *heads, intermediate, target.limits.vocab_size, vocabulary, hidden)
    return EagleHead(config).requires_grad_(False)


def contenders(
    target: NativeRunner, features: NativeFeatures, head: EagleHead, args: argparse.Namespace
) -> list[Contender]:
    """The head in every format, its module code, and the shipped draft."""
    identity, limits = target.identity, target.limits
    found = []
    for name in args.formats.split(","):
        execution = execution_of(name, args.threads)
        runner = load_native_head(weights_of(head), features, features.embedding, target, execution, identity)
        found.append(Contender(f"native, {runner.identity.dtype}", runner))
    read = of_native(features)
    module = head.to(read.values.dtype)
    platform = platform_of("cpu")
    found.append(Contender(MODULE, EagleRunner(module, read, read.embedding, limits, identity, platform)))
    if (draft := embedded_draft()) and args.target_model is None:
        shape = Shape(limits.slots, limits.max_length, limits.max_draft, limits.chunk)
        loaded = load_runner(unpacked(find(draft)), execution_of("auto", args.threads), shape, verifies=False)
        found.append(Contender(DRAFT, loaded))
    return found


def fill(runner: Runner, slots: int) -> None:
    for slot in range(slots):
        for start in range(0, PREFIX, CHUNK):
            runner.prefill([PrefillRow(slot, start, _tokens(start, CHUNK))])


def _tokens(start: int, count: int) -> tuple[int, ...]:
    return tuple((97 * i + 13) % 251 for i in range(start, start + count))  # any model has so many


def rows(count: int, k: int) -> list[ProposeRow]:
    """Returns rows that ask for `k` drafts after a round that committed three tokens."""
    return [ProposeRow(slot, PREFIX - 1, _tokens(PREFIX - 3, 3), k, GREEDY) for slot in range(count)]


def measure(target: NativeRunner, drafts: Sequence[Contender], args: argparse.Namespace) -> dict[str, list[float]]:
    """Times all contenders in turn; the order rotates. Returns the target's own milliseconds, of each run."""
    verified = [VerifyRow(slot, PREFIX - 1, 13, _tokens(0, args.k), GREEDY) for slot in range(args.rows)]
    rounds = {one.name: fused(target, one.runner) for one in drafts}
    own: dict[str, list[float]] = {}
    for run in range(-WARM, args.runs):
        taken: list[tuple[dict[str, list[float]], dict[str, float]]] = []
        for one in (*drafts[run % len(drafts) :], *drafts[: run % len(drafts)]):
            taken.append((one.milliseconds, _timed(one, rounds[one.name], lambda: target.verify(verified), args)))
        token = _milliseconds(lambda: target.verify([replace(row, draft=()) for row in verified]))
        taken.append((own, {"a token": token, "verification": _milliseconds(lambda: target.verify(verified))}))
        for kept, times in taken if run >= 0 else ():
            for what, time_ in times.items():
                kept.setdefault(what, []).append(time_)
    return own


def _timed(
    one: Contender,
    step: Callable[..., Sequence[object]],
    verification: Callable[[], object],
    args: argparse.Namespace,
) -> dict[str, float]:
    """Milliseconds of a contender's steps. They find in the CPU's caches what a round before leaves there."""
    asked, begun = rows(args.rows, args.k), rows(args.rows, 1)
    done: list[object] = []
    step([FusedRow(row) for row in asked])
    round_ = _milliseconds(lambda: done.extend(step([FusedRow(row) for row in asked])))
    first = _milliseconds(lambda: one.runner.propose(begun))
    verification()
    whole = _milliseconds(lambda: one.runner.propose(asked))
    verification()
    chunk = _milliseconds(lambda: one.runner.prefill([PrefillRow(0, CHUNK, _tokens(CHUNK, CHUNK))]))
    assert isinstance(done[0], FusedResult)
    drafting = 1000 * done[0].draft_seconds
    return {"first": first, "draft": whole, "prefill": chunk, "round": round_, "drafting": drafting}


def _milliseconds(step: Callable[[], object]) -> float:
    began = time.perf_counter()
    step()
    return 1000 * (time.perf_counter() - began)


def show(figures: dict[str, dict[str, float]], megabytes: dict[str, float | None]) -> None:
    """Prints a line for each contender; the module code and the shipped draft are what the others are held to."""
    heads = ("MB", "first", "next", "prefill 64", "round", "drafting", "the rest", "next / draft", "module / next")
    print(f"{'':24}" + "".join(f"{name:>14}" for name in heads))
    for name, found in figures.items():
        ratios = [f"{found['next'] / figures[DRAFT]['next']:.2f}" if DRAFT in figures else "-"]
        ratios.append(f"{figures[MODULE]['next'] / found['next']:.1f}")
        size = megabytes[name]
        parts = [found[what] for what in ("first", "next", "prefill", "round", "drafting", "rest")]
        cells = ["-" if size is None else f"{size:.1f}", *(f"{part:.3f}" for part in parts), *ratios]
        print(f"{name:24}" + "".join(f"{cell:>14}" for cell in cells))


def parsed(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(prog="python -m benchmarks.head_step", description=__doc__, allow_abbrev=False)
    parser.flag("--target-model", metavar="DIR", help="default: the embedded target")
    parser.flag("--head", metavar="DIR", help="a trained head in place of random ones")
    parser.flag("--shapes", default="1024x8192", help="INTERMEDIATExVOCABULARY of random heads, separated by commas")
    parser.flag("--formats", default="auto", help=f"of the head, of {', '.join(FORMATS)}")
    parser.flag("--weights", default="auto", help=f"the target's format, one of {', '.join(FORMATS)}")
    parser.flag("--threads", type=positive, default=None)
    parser.flag("--rows", type=positive, default=1, help="sequences in a step")
    parser.flag("--k", type=positive, default=4, help="draft tokens of a round, 2 or more")
    parser.flag("--runs", type=positive, default=60)
    parser.flag("--output", type=Path, default=None, help="a JSON file")
    args = parser.parse_args(argv)
    if args.k < 2:
        parser.error(f"k: {args.k} is below 2")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parsed(argv)
    shape = Shape(max(4, args.rows), 512, args.k, CHUNK)
    target = load_runner(unpacked(find(args.target_model)), execution_of(args.weights, args.threads), shape)
    if not isinstance(target, NativeRunner):
        print("the target does not run in native steps here", file=sys.stderr)
        return 1
    target.warm_up()
    features = target.hand_out(default_layers(target.model.layer_count))
    report: dict[str, object] = {"target": target.identity.dtype, "threads": target.model.threads.count}
    for name in [args.head] if args.head else args.shapes.split(","):
        head = read_head(Path(name))[0] if args.head else random_head(target, name)
        drafts = contenders(target, features, head, args)
        for runner in (target, *(one.runner for one in drafts)):
            fill(runner, args.rows)
        own = measure(target, drafts, args)
        found = {}
        for what, of in STATISTICS.items():
            print(f"\n{name}: {what} of {args.runs} runs, ms; {args.rows} rows, rounds of {args.k} draft tokens")
            found[what] = {one.name: one.figures(of, args.k) for one in drafts}
            show(found[what], {one.name: one.megabytes for one in drafts})
            target_alone = {step: of(taken) for step, taken in own.items()}
            print("the target alone: " + ", ".join(f"{step} {taken:.2f}" for step, taken in target_alone.items()))
            found[what]["target"] = target_alone
        report[name] = found
    if args.output:
        args.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
