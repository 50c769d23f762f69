"""Measures the native library's products of quantised weights against the processor's peak, and steps of few tokens.

    .venv/bin/python -m benchmarks.products --against ../main/tandem/runners/native

Runs on one thread in processor time, so that other programs cost only caches and bandwidth. A product includes its
call, quantisation and outputs. `--against`: sources of another checkout, timed in turn in the same process.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import quantised
from benchmarks.arguments import Parser, positive
from benchmarks.keeping import kept
from benchmarks.others import watch
from benchmarks.peak import Meter, Peaks
from tandem.checkpoints.gguf_blocks import FORMATS
from tandem.runners.native import compilation
from tandem.runners.native.native_runner import NativeRunner
from tandem.runners.native.steps import TileState

INPUTS, OUTPUTS = 512, 1536  # of a matrix that stays in a core's own cache
PRODUCT_TOKENS, STEP_TOKENS = (1, 4, 8, 16, 64), (1, 2, 4, 8, 16, 64)
HERE, WITHOUT, BEFORE = "here", "without tiles", "before"


@dataclass
class Outcome:
    """Measurements by version, format and tokens."""

    peaks: Peaks = field(default_factory=Peaks)
    busy: float | None = None
    products: dict[str, dict[str, dict[int, float]]] = field(default_factory=dict)  # multiply-adds per second
    steps: dict[str, dict[str, dict[int, float]]] = field(default_factory=dict)  # least milliseconds


class Product:
    """A matrix of random blocks."""

    def __init__(self, library: Any, form: str, tiles: bool) -> None:
        chance, size = np.random.default_rng(1), FORMATS[form]
        blocks = chance.integers(0, 64, (OUTPUTS, INPUTS // size.inputs * size.bytes), dtype=np.uint8)  # finite scales
        self._library, self._tiles = library, tiles
        self._made = library.product(size.kind, INPUTS, OUTPUTS, blocks.ctypes.data, blocks.shape[1])
        self._x = chance.standard_normal((64, INPUTS)).astype(np.float32)
        self._to = np.empty((64, OUTPUTS), dtype=np.float32)

    def __call__(self, tokens: int, times: int) -> None:
        self._library.switch_tiles(self._tiles)
        for _ in range(times):
            self._library.multiply(self._made, self._x.ctypes.data, tokens, self._to.ctypes.data)


def seconds(run: Callable[[], object]) -> float:
    began = time.clock_gettime(time.CLOCK_THREAD_CPUTIME_ID)
    run()
    return time.clock_gettime(time.CLOCK_THREAD_CPUTIME_ID) - began


def measure_products(versions: dict[str, Path], runs: int, outcome: Outcome) -> None:
    with tempfile.TemporaryDirectory() as folder:
        libraries = {name: built(sources, Path(folder)) for name, sources in versions.items()}
    by_tiles = libraries[HERE].switch_tiles(1) == TileState.USED
    if by_tiles:
        libraries[WITHOUT] = libraries[HERE]
    meter = Meter(by_tiles)
    for form in FORMATS:
        products = {name: Product(library, form, name != WITHOUT) for name, library in libraries.items()}
        for tokens in PRODUCT_TOKENS:
            calls = max(1, 16 // tokens)
            best = dict.fromkeys(products, float("inf"))
            for _ in range(runs):
                outcome.peaks = meter.measure()
                for name, product in products.items():
                    taken = seconds(partial(product, tokens, calls))
                    best[name] = min(best[name], taken / calls)
            for name, taken in best.items():
                rates = outcome.products.setdefault(name, {}).setdefault(form, {})
                rates[tokens] = tokens * INPUTS * OUTPUTS / taken


def measure_steps(versions: dict[str, Path], formats: Sequence[str], runs: int, outcome: Outcome) -> None:
    settings = argparse.Namespace(model=None, threads=1, window=quantised.CHUNK)
    tokens = [(997 * i + 13) % 40000 for i in range(quantised.PREFIX + quantised.CHUNK)]
    for form in formats:
        runners: dict[str, NativeRunner] = {}
        for name, sources in versions.items():
            compilation.SOURCES = sources
            runners[name] = runner = quantised.load(form, settings)
            for start in range(0, quantised.PREFIX, quantised.CHUNK):
                runner.model.feed([0], [start], [tokens[start : start + quantised.CHUNK]], 0)
        for width in STEP_TOKENS:
            row, wants = tokens[quantised.PREFIX : quantised.PREFIX + width], 1 if width == quantised.CHUNK else 2
            for run in range(runs if width < 16 else max(3, runs // 4)):
                for name in sorted(runners, reverse=bool(run % 2)):
                    step = partial(runners[name].model.feed, [0], [quantised.PREFIX], [row], wants)
                    taken = 1000 * seconds(step)
                    least = outcome.steps.setdefault(name, {}).setdefault(form, {})
                    least[width] = min(taken, least.get(width, taken))


def built(sources: Path, folder: Path) -> Any:
    """The library of products by these sources."""
    made = folder / f"{len(list(folder.iterdir()))}.so"
    parts = [Path(__file__).with_suffix(".cpp"), sources / "products.cpp"]
    subprocess.run(
        [compilation.find_compiler(), *compilation.FLAGS, "-w", f"-I{sources}", *parts, "-o", made], check=True
    )
    library = ctypes.CDLL(str(made))
    library.product.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]
    library.product.restype = ctypes.c_void_p
    library.multiply.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
    library.multiply.restype = None
    return library


def report(outcome: Outcome, console: Console) -> None:
    if outcome.products:
        title = f"G multiply-adds a second on one core, matrix in its cache (share of the peak: {outcome.peaks})"
        table = Table(title=title)
        _rows(table, outcome.products, PRODUCT_TOKENS, lambda name, rates, n: _share(rates[n], n, name, outcome.peaks))
        console.print(table)
    if outcome.steps:
        table = Table(title="Least milliseconds of a step on one thread (over a step of one token)")
        _rows(table, outcome.steps, STEP_TOKENS, lambda _, taken, n: f"{taken[n]:.2f} ({taken[n] / taken[1]:.2f})")
        console.print(table)
    for title, found, faster in (("products", outcome.products, 1), ("steps", outcome.steps, -1)):
        for form in found.get(BEFORE, {}):
            both = {n: (found[HERE][form][n] / found[BEFORE][form][n]) ** faster for n in found[HERE][form]}
            ratios = ", ".join(f"{n} tokens {ratio:.2f}" for n, ratio in both.items())
            console.print(f"{title}, {form}: times as fast as before: {ratios}")
    if outcome.busy is not None:
        console.print(f"before it began, {outcome.busy:.0%} of the machine was busy with other work")


def _share(rate: float, tokens: int, version: str, peaks: Peaks) -> str:
    share = peaks.of(tokens, version == HERE).share(rate)
    return f"{rate / 1e9:.0f}" + ("" if share is None else f" ({share:.0%})")


def _rows(
    table: Table,
    found: dict[str, dict[str, dict[int, float]]],
    tokens: Sequence[int],
    cell: Callable[[str, dict[int, float], int], str],
) -> None:
    for column in ("weights", "version", *(f"{n} tokens" for n in tokens)):
        table.add_column(column, justify="right" if "tokens" in column else "left")
    for form in next(iter(found.values())):
        for name, forms in found.items():
            table.add_row(form, name, *(cell(name, forms[form], n) for n in tokens))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    p = Parser(prog="benchmarks.products", description=(__doc__ or "").splitlines()[0])
    p.flag("--against", type=Path, metavar="FOLDER", help="tandem/runners/native of another checkout")
    p.flag("--formats", default="int8,as-stored", help="of the steps: values of --weights (default: %(default)s)")
    p.flag("--parts", default="products,steps", help="(default: %(default)s)")
    p.flag("--runs", type=positive, default=40, help="times each product and step is run (default: %(default)s)")
    p.flag("--output", type=Path, default=Path("results/products.json"), help="(default: %(default)s)")
    args = p.parse_args(argv)
    args.formats, args.parts = args.formats.split(","), args.parts.split(",")
    if unknown := set(args.parts) - {"products", "steps"}:
        p.error(f"parts: {unknown.pop()!r} is neither products nor steps")
    if args.against is not None and not (args.against / "api.cpp").is_file():
        p.error(f"against: {args.against} has no api.cpp")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args, outcome = parse(argv), Outcome()
    versions = {HERE: compilation.SOURCES} | ({BEFORE: args.against.resolve()} if args.against else {})
    settings = json.loads(json.dumps(vars(args), default=str))
    with kept(args.output, lambda: {"settings": settings, **asdict(outcome)}, lambda: asdict(outcome)):
        outcome.busy = watch()
        if "products" in args.parts:
            measure_products(versions, args.runs, outcome)
        if "steps" in args.parts:
            measure_steps(versions, args.formats, args.runs, outcome)
    report(outcome, Console() if sys.stdout.isatty() else Console(width=150))
    print(f"wrote {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
