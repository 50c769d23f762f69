"""Holds how many clients one target serves against the law of offloaded drafts, at several ratios of t_d to t_v.

`python -m benchmarks.capacity` rehearses a target that verifies one round at a time, as the law assumes: a step takes
t_v for each row of it, and a draft step t_d for each row. For each ratio a comparison finds the most clients of which
the 95th percentile of the time per token is within a bound, with drafts beside the target (fused) and with a draft
worker for each client (distributed); arXiv 2606.25091 expects 1 + g t_d / t_v times as many of the latter. A ratio
whose comparison is complete is not measured again. Prompts are of one chunk and outputs longer, since the law assumes
that prompts cost nothing: while a request waits for the rounds under way before its first token, which the time per
token does not count, the others are one fewer, and with fused that lasts longer. `--page` puts the figures into
docs/comparison.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.arguments import Parser, positive
from benchmarks.links_judged import how_measured, late_steps, measured
from benchmarks.links_page import CAPACITY, write
from tandem.cli import compare
from tandem.cli.option import numbers
from tandem.comparison.analysis.capacity import gain_of, law_of
from tandem.comparison.analysis.comparison import Comparison, read_comparison
from tandem.host.device_times import DeviceTimes, StepTime, StepTimes, text_of

DRAFTED = 3  # g, draft tokens of a round
ROWS = (1, 2, 4, 8, 16)
PROMPT_MS = 1.0  # of a prefill step; the law assumes that prompts cost nothing
BOUND_STEPS = 7 / 3  # bound on TPOT, in t_v: where fused serves a few clients
CLIENTS = "2,3,4,5,6,7"
PROMPT_TOKENS = 24  # one chunk
OFF = 0.10
HEAD = (
    "| t_d / t_v | fused, clients | distributed | times as many | the law | off | late steps |",
    "|---|---|---|---|---|---|---|",
)


@dataclass(frozen=True, slots=True)
class Knee:
    """The clients served at one ratio, and the law's gain."""

    ratio: float
    fused: float
    distributed: float
    gain: float
    law: float
    late: float

    @property
    def off(self) -> float:
        return self.gain / self.law - 1

    def __str__(self) -> str:
        off = f"{100 * self.off:+.0f} %".replace("-", "−")
        served = f"{self.fused:.1f} | {self.distributed:.1f} | {self.gain:.2f} | {self.law:.2f}"
        return f"| {self.ratio:g} | {served} | {off} | {100 * self.late:.0f} % |"


def times_of(ratio: float, step_ms: float) -> DeviceTimes:
    """Returns step times of a device that serves rows one after the other."""

    def each(ms: float) -> StepTimes:
        points = tuple(StepTime(ms * rows, width, rows) for rows in ROWS for width in (1, 1 + DRAFTED))
        return StepTimes(points, "toy", StepTimes((StepTime(PROMPT_MS),)))

    return DeviceTimes(
        f"one-at-a-time-{ratio:g}",
        "no device: rows one after the other",
        "made up, to hold the law of arXiv 2606.25091 against servers",
        each(step_ms),
        each(ratio * step_ms),
    )


def knee_of(ratio: float, comparison: Comparison) -> Knee:
    """Reads a comparison. Raises ValueError if an architecture met the bound with all clients or none."""
    fused = comparison.base.of("fused")
    gain, law = gain_of(comparison.capacity), law_of(fused) if fused else None
    if gain is None or law is None:
        raise ValueError(f"t_d / t_v {ratio:g}: no knee of both, or no law: see the report")
    clients = {one.architecture: one.clients for one in comparison.capacity}
    return Knee(ratio, clients["fused"], clients["distributed"], gain, law, late_steps(comparison))


def measure(ratio: float, args: argparse.Namespace, folder: Path) -> int:
    """Runs a ratio's comparison; returns its exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    (times := folder / "times.json").write_text(text_of(times_of(ratio, args.step_ms)))
    asked = ["--backend", "toy", "--model", "step=0", "--draft", "model", "--draft-model", f"miss={args.miss},step=0"]
    asked += ["--architectures", "autoregressive,distributed,fused", "--speculation-length", f"{DRAFTED}"]
    asked += ["--rehearse", str(times), "--capacity", f"{BOUND_STEPS * args.step_ms:g}", "--concurrency", args.clients]
    asked += ["--max-new-tokens", "32", "--workloads", "code,chat,prose", "--prompts-per-workload", "1"]
    asked += ["--mean-input-tokens", f"{PROMPT_TOKENS}", "--mean-output-tokens", str(args.max_new_tokens)]
    return compare.main([*asked, "--output-dir", str(folder)])


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(prog="capacity", description=__doc__, allow_abbrev=False)
    parser.flag("--ratios", default="0.1,0.2,0.4", help="of t_d to t_v (default: %(default)s)")
    parser.flag("--step-ms", type=float, default=40.0, metavar="MS", help="t_v (default: %(default)s)")
    parser.flag("--miss", type=float, default=0.3, help="share of missed draft tokens (default: %(default)s)")
    parser.flag("--clients", default=CLIENTS, help="numbers of clients (default: %(default)s)")
    parser.flag(
        "--max-new-tokens", type=positive, default=72, metavar="N", help="outputs of loads (default: %(default)s)"
    )
    parser.flag("--page", action="store_true", help="put the figures into docs/comparison.md")
    parser.flag("--output", type=Path, default=Path("results/capacity"), help="folder (default: %(default)s)")
    args = parser.parse_args(argv)
    try:
        args.ratios = numbers("ratios", args.ratios, float)
    except ValueError as error:
        parser.error(str(error))
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measures missing ratios, prints the knees; returns 1 if any is far from the law."""
    args = parse(argv)
    knees, comparisons = [], []
    for ratio in args.ratios:
        folder = args.output / f"{ratio:g}"
        if not measured(folder / "comparison.json") and (code := measure(ratio, args, folder)) not in (0, 1):
            print(f"capacity: the comparison of {ratio:g} ended with {code}", file=sys.stderr)
            return code
        comparisons.append(read_comparison(folder / "comparison.json"))
        try:
            knees.append(knee_of(ratio, comparisons[-1]))
        except ValueError as error:
            print(f"capacity: {error}", file=sys.stderr)
            return 1
    near = all(abs(knee.off) <= OFF for knee in knees)
    bar = f"{'met' if near else 'MISSED'}: the measured knee within {OFF:.0%} of the law"
    lines = [*HEAD, *map(str, knees), "", f"- {bar}"]
    print("\n".join(lines))
    if args.page:
        steps = f"Steps of {args.step_ms:g} ms a row, {DRAFTED} draft tokens, the toy backend"
        write(CAPACITY, [f"{steps} ({how_measured(comparisons)}):", "", *lines])
    return 0 if near else 1


if __name__ == "__main__":
    sys.exit(main())
