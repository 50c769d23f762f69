"""Measures what LoRA adapters add to a target's steps: `python -m benchmarks.adapters`.

One process holds two runners of the target: one that never had an adapter, and one with several of each rank, on all
linear layers of its layers. A step of each kind runs in turn: rows without adapters on either, rows that all have one
adapter, rows of several, and half of them without. The kinds are compared with base rows beside adapters, in the same
turn. `width` 1 is plain decoding, above it a verification of drafts.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.arguments import Parser, positive
from benchmarks.keeping import kept
from tandem.checkpoints.adapter_files import Adapter, LowRank
from tandem.checkpoints.locate import find
from tandem.runners.loading import Execution, Shape, load_runner
from tandem.runners.native.library import ModelShape
from tandem.runners.native.runner import NativeRunner
from tandem.runners.protocol import PrefillRow, VerifyRow
from tandem.speculation.types import Request

BARE, BASE = "no adapters loaded", "base rows"


@dataclass(frozen=True)
class Settings:
    """The settings of one run."""

    runs: int
    rows: int
    widths: list[int]
    ranks: list[int]
    adapters: int
    context: int
    threads: int | None
    formats: list[str]
    output: Path


@dataclass(frozen=True, slots=True)
class Kind:
    """A step to time: `adapters` of its rows, by number; `bare`: on the runner that never had one."""

    name: str
    adapters: tuple[int, ...]
    bare: bool = False


Times = dict[str, dict[str, list[float]]]
"""Seconds of steps by setting and kind, in the order measured."""


def made_adapter(sizes: Mapping[str, tuple[int, int]], layers: int, rank: int, seed: int) -> Adapter:
    """An adapter on every linear layer; `sizes`: outputs and inputs by the layer's path below model.layers.N."""
    chance, parts = torch.Generator().manual_seed(seed), {}
    for layer in range(layers):
        for path, (outputs, inputs) in sizes.items():
            down = torch.randn(rank, inputs, generator=chance) * 0.01
            up = torch.randn(outputs, rank, generator=chance) * 0.01
            parts[f"model.layers.{layer}.{path}"] = LowRank(down.numpy(), up.numpy(), 1.0)
    return Adapter(f"r{rank}-{seed}", f"{rank}-{seed}", parts)


def linear_sizes(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of the linear layers of a layer, by path."""
    queries, keys, inner = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.intermediate
    return {
        "self_attn.q_proj": (queries, shape.hidden),
        "self_attn.k_proj": (keys, shape.hidden),
        "self_attn.v_proj": (keys, shape.hidden),
        "self_attn.o_proj": (shape.hidden, queries),
        "mlp.gate_proj": (inner, shape.hidden),
        "mlp.up_proj": (inner, shape.hidden),
        "mlp.down_proj": (shape.hidden, inner),
    }


def kinds_of(rank: int, numbers: Sequence[int], rows: int) -> list[Kind]:
    """Returns the kinds of steps to time, and the adapter of each row. `numbers`: the adapters of one rank."""
    first, several = numbers[0], tuple(numbers[i % len(numbers)] for i in range(rows))
    return [
        Kind(f"rank {rank}: one adapter", (first,) * rows),
        Kind(f"rank {rank}: {len(set(several))} adapters", several),
        Kind(f"rank {rank}: half without", tuple(each if i % 2 else 0 for i, each in enumerate(several))),
    ]


def step_of(kind: Kind, width: int, context: int, vocabulary: int) -> list[VerifyRow]:
    tokens = tuple((31 * i + 7) % vocabulary for i in range(width))
    return [
        VerifyRow(slot, context, tokens[0], tokens[1:], Request(), adapter=adapter)
        for slot, adapter in enumerate(kind.adapters)
    ]


def in_turn(
    settings: Settings,
    runners: Mapping[bool, NativeRunner],
    kinds: Sequence[Kind],
    width: int,
    times: dict[str, list[float]],
) -> None:
    """Times a step of each kind in turn, after a turn that warms up. Every other turn is reversed."""
    for run in range(settings.runs + 1):
        for kind in kinds if run % 2 else reversed(kinds):
            runner = runners[kind.bare]
            rows = step_of(kind, width, settings.context, runner.limits.vocab_size)
            began = time.perf_counter()
            runner.verify(rows)
            if run:
                times.setdefault(kind.name, []).append(time.perf_counter() - began)


def loaded(settings: Settings, weights: str, rows: int) -> NativeRunner:
    execution = Execution(threads=settings.threads, weights=weights)
    shape = Shape(rows, settings.context + max(settings.widths) + 8, max(settings.widths))
    runner = load_runner(find(None), execution, shape)
    assert isinstance(runner, NativeRunner), "native steps cannot run here"
    runner.warm_up()
    tokens = tuple(i % runner.limits.vocab_size for i in range(settings.context))
    for slot in range(rows):
        for start in range(0, settings.context, runner.limits.chunk):
            runner.prefill([PrefillRow(slot, start, tokens[start : start + runner.limits.chunk])])
    return runner


def measure(settings: Settings, times: Times) -> None:
    for weights in settings.formats:
        runners = {bare: loaded(settings, weights, settings.rows) for bare in (True, False)}
        adapted, kinds = runners[False], [Kind(BARE, (0,) * settings.rows, True), Kind(BASE, (0,) * settings.rows)]
        shape = adapted.model.sizes
        for index, rank in enumerate(settings.ranks):
            numbers = range(1 + index * settings.adapters, 1 + (index + 1) * settings.adapters)
            for number in numbers:
                adapted.put_adapter(number, made_adapter(linear_sizes(shape), shape.layers, rank, number))
            kinds += kinds_of(rank, numbers, settings.rows)
        for width in settings.widths:
            name = f"{weights}, {settings.rows} rows, width {width}"
            in_turn(settings, runners, kinds, width, times.setdefault(name, {}))


def ratio(times: Mapping[str, Sequence[float]], kind: str) -> float:
    """The median over turns of a kind's time over that of base rows in the same turn."""
    return statistics.median(mine / base for mine, base in zip(times[kind], times[BASE], strict=False))


def report(times: Times) -> list[str]:
    lines = []
    for name, by_kind in times.items():
        lines.append(name)
        for kind, seconds in by_kind.items():
            of_base = f"ratio {ratio(by_kind, kind):.3f}" if BASE in by_kind else ""
            lines.append(f"  {kind:24} {1000 * statistics.median(seconds):8.2f} ms  {of_base}")
    return lines


def parse(argv: Sequence[str] | None = None) -> Settings:
    parser = Parser(prog="adapters", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.flag("--runs", type=positive, default=25, metavar="N", help="turns (default: 25)")
    parser.flag("--rows", type=positive, default=8, metavar="N", help="rows of a step (default: 8)")
    parser.flag("--widths", type=positive, nargs="+", default=[1, 4], help="tokens of a row (default: 1 4)")
    parser.flag("--ranks", type=positive, nargs="+", default=[8, 64], help="(default: 8 64)")
    parser.flag("--adapters", type=positive, default=4, metavar="N", help="of each rank (default: 4)")
    parser.flag("--context", type=positive, default=128, metavar="N", help="tokens before the step's (default: 128)")
    parser.flag("--threads", type=positive, metavar="N", help="threads of a step (default: torch's choice)")
    parser.flag("--formats", nargs="+", default=["auto", "bfloat16"], help="--weights (default: auto bfloat16)")
    parser.flag("--output", type=Path, default=Path("results/adapters.json"), help="(default: %(default)s)")
    return Settings(**vars(parser.parse_args(argv)))


def main(argv: Sequence[str] | None = None) -> int:
    settings = parse(argv)
    times: Times = {}
    document = lambda: {"settings": asdict(settings), "seconds": times, "report": report(times)}  # noqa: E731
    with kept(settings.output, document, lambda: dict(times)):
        measure(settings, times)
    print("\n".join(report(times)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
