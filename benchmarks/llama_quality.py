"""Compares what a format costs in quality here and in llama.cpp, on the same tokens.

    .venv/bin/python -m benchmarks.llama_quality --llama-perplexity .llama-cpp/build/bin/llama-perplexity

Both are held to one reference, llama.cpp's logits of the BF16 file: it keeps residuals in float32, so this is nearly
what the weights say. Ours are held to our own bfloat16 too, whose activations are rounded. The tokens, the reference
(16 bits a log-probability) and what is judged, the second half of each window, are llama.cpp's.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.arguments import Parser, positive
from benchmarks.formats import FORMATS, STORED
from benchmarks.keeping import kept
from benchmarks.llama_files import read, write_target
from benchmarks.quantised import BASE, Logits, held_out, load, log_softmax, logits_of
from tandem.checkpoints.locate import find

_MAGIC = b"_logits_"


@dataclass
class Divergence:
    """Holds the mean KL in nats, and the share of positions whose most probable token is the same."""

    mean: float
    same: float


@dataclass
class Outcome:
    """Holds the divergences by format: `llama` and `ours` from the reference, `own` from our own bfloat16."""

    tokens: int = 0
    llama: dict[str, Divergence] = field(default_factory=dict)
    ours: dict[str, Divergence] = field(default_factory=dict)
    own: dict[str, Divergence] = field(default_factory=dict)


@dataclass(frozen=True)
class Reference:
    """`windows` of tokens, and log-probabilities, float32 [judged positions, vocabulary]."""

    windows: list[list[int]]
    logs: Logits


def reference_in(file: Path) -> Reference:
    """Reads what llama-perplexity wrote. Raises ValueError for another file.

    Source: tools/perplexity/perplexity.cpp: sizes, tokens, and for each position two floats and 16 bits a token.
    """
    data = np.fromfile(file, np.uint8)
    if bytes(data[: len(_MAGIC)]) != _MAGIC:
        raise ValueError(f"{file} holds no logits of llama-perplexity")
    length, vocabulary, count = (int(number) for number in data[8:20].view(np.int32))
    begin = 20 + 4 * length * count
    tokens = data[20:begin].copy().view(np.int32).reshape(count, length)
    rows = data[begin:].view(np.uint16).reshape(-1, 2 * ((vocabulary + 1) // 2) + 4)
    scale, least = np.ascontiguousarray(rows[:, :4]).view(np.float32).T
    logs = rows[:, 4 : 4 + vocabulary].astype(np.float32) * scale[:, None] + least[:, None]
    return Reference([[int(token) for token in window] for window in tokens], logs)


def judged(windows: Sequence[Sequence[int]]) -> np.ndarray:
    """Returns a mask [tokens] of the positions that are scored: the second half of each window, without its last."""
    return np.concatenate(
        [[len(window) // 2 <= at < len(window) - 1 for at in range(len(window))] for window in windows]
    )


def parsed(said: str) -> Divergence:
    """Parses the figures that llama-perplexity prints. Raises ValueError where it printed none."""
    mean, same = re.search(r"Mean\s+KLD:\s+(\S+)", said), re.search(r"Same top p:\s+(\S+)", said)
    if not mean or not same:
        raise ValueError(f"llama-perplexity printed no divergence: {said[-500:]}")
    return Divergence(float(mean[1]), float(same[1]) / 100)


def measure_llama(args: argparse.Namespace, outcome: Outcome, folder: Path) -> Reference:
    """Has llama.cpp judge its formats; returns what it held them to."""
    stored = find(args.model).gguf_file
    if stored is None:
        raise ValueError(f"--model {args.model} is no GGUF file")
    source, text, base = read(stored), folder / "text.txt", folder / "base.kld"
    text.write_text(held_out(args.text), encoding="utf-8")

    def run(model: Path, *flags: str) -> str:
        command = [args.llama_perplexity, "-m", model, "-f", text, "-c", args.window, "--chunks", args.windows]
        command += ["-t", args.threads, "--kl-divergence-base", base, *flags]
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise ValueError(f"llama-perplexity failed ({done.returncode}): {done.stderr[-500:]}")
        return done.stdout + done.stderr

    for form in FORMATS:  # bfloat16 first: what the others are held to
        file = folder / f"{form.weights}.gguf"
        if form.file_type != STORED:
            write_target(source, form.file_type, file)
        else:
            shutil.copyfile(stored, file)
        said = run(file, *([] if form.weights == BASE else ["--kl-divergence"]))
        file.unlink()
        if form.weights != BASE:
            outcome.llama[form.weights] = parsed(said)
        print(f"llama.cpp read {form.weights}", file=sys.stderr, flush=True)
    return reference_in(base)


def compared(logs: Logits, other: Logits) -> Divergence:
    """KL(reference || other) as llama.cpp computes it, from log-probabilities and logits [positions, vocabulary]."""
    found = []
    for log, logits in zip(logs, other, strict=True):
        counts = log > -16
        found.append((np.exp(log[counts]) * (log[counts] - log_softmax(logits[None])[0][counts])).sum())
    return Divergence(float(np.mean(found)), float((logs.argmax(-1) == other.argmax(-1)).mean()))


def measure_ours(args: argparse.Namespace, outcome: Outcome, reference: Reference) -> None:
    counts = judged(reference.windows)
    outcome.tokens = int(counts.sum())
    base: Logits | None = None
    for weights in (BASE, "float32", *(form.weights for form in FORMATS[1:])):
        logits = logits_of(load(weights, args), reference.windows)[counts]
        outcome.ours[weights] = compared(reference.logs, logits)
        base = logits if base is None else base
        outcome.own[weights] = compared(log_softmax(base).astype(np.float32), logits)
        print(f"Tandem read {weights}", file=sys.stderr, flush=True)


def report(outcome: Outcome, console: Console) -> None:
    table = Table(title=f"{outcome.tokens} tokens: KL from llama.cpp's BF16, and from our bfloat16")
    columns = ("weights", "Tandem", "llama.cpp", "ratio", "same token", "llama.cpp's", "Tandem from its bfloat16")
    for column in columns:
        table.add_column(column, justify="left" if column == "weights" else "right")
    for form, ours in outcome.ours.items():
        theirs = outcome.llama.get(form)
        beside = (f"{theirs.mean:.5f}", f"{ours.mean / theirs.mean:.2f}") if theirs and theirs.mean > 0 else ("-", "-")
        same = f"{theirs.same:.1%}" if theirs else "-"
        table.add_row(form, f"{ours.mean:.5f}", *beside, f"{ours.same:.1%}", same, f"{outcome.own[form].mean:.5f}")
    console.print(table)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    p = Parser(prog="benchmarks.llama_quality", description=(__doc__ or "").splitlines()[0])
    p.flag("--llama-perplexity", type=Path, required=True, help="llama.cpp's program (install_llama_cpp.sh builds it)")
    p.flag("--model", help="a GGUF file (default: the embedded one)")
    p.flag("--text", type=Path, help="held-out text (default: pages of Python's reference)")
    p.flag("--window", type=positive, default=512, help="tokens read together (default: %(default)s)")
    p.flag("--windows", type=positive, default=8, help="(default: %(default)s)")
    p.flag("--threads", type=positive, default=len(os.sched_getaffinity(0)), help="(default: the processors)")
    p.flag("--output", type=Path, default=Path("results/llama_quality.json"), help="(default: %(default)s)")
    return p.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args, outcome = parse(argv), Outcome()
    settings = json.loads(json.dumps(vars(args), default=str))
    with kept(args.output, lambda: {"settings": settings, **asdict(outcome)}, lambda: asdict(outcome)):
        with tempfile.TemporaryDirectory() as folder:
            reference = measure_llama(args, outcome, Path(folder))
        measure_ours(args, outcome, reference)
    report(outcome, Console() if sys.stdout.isatty() else Console(width=120))
    print(f"wrote {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
