"""Compares adaptive speculation lengths with fixed ones and plain decoding, on the embedded pair.

`python -m benchmarks.adaptive_length --architectures fused`. Prints TPOT by workload, auto over the best fixed length
(allowed: 1.05) and auto over plain decoding (allowed: 1.03).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.arguments import Parser, positive
from benchmarks.keeping import kept
from tandem.comparison.measuring.architectures import AUTOREGRESSIVE, DISTRIBUTED, FUSED, REMOTE_DRAFT
from tandem.comparison.measuring.config import ComparisonConfig
from tandem.comparison.measuring.deployment import Endpoint, baseline_of, deploy
from tandem.comparison.measuring.machine import this_machine
from tandem.comparison.measuring.servers import Fleet
from tandem.comparison.measuring.timed_request import Contender, measure
from tandem.comparison.measuring.workloads import BUILT_IN, Prompt, built_in_prompts
from tandem.rpc.generation_client import GenerationClient
from tandem.speculation.types import GenerationRequest, ModelInfo, SamplingParams

ADAPTIVE, PLAIN = "auto", "plain"
OVER_BEST, OVER_PLAIN = 1.05, 1.03
SPECULATING = (FUSED.name, DISTRIBUTED.name, REMOTE_DRAFT.name)


@dataclass(frozen=True, slots=True)
class Sample:
    architecture: str
    length: str  # auto, plain, or a number
    workload: str
    prompt: str
    run: int
    tpot_s: float
    mean_draft_length: float
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """One architecture on one workload."""

    architecture: str
    workload: str
    tpot_s: Mapping[str, float]  # by length; mean over prompts of medians over runs
    mean_draft_length: float

    @property
    def best(self) -> str:
        return min((k for k in self.tpot_s if k not in (ADAPTIVE, PLAIN)), key=self.tpot_s.__getitem__)

    @property
    def over_best(self) -> float:
        return self.tpot_s[ADAPTIVE] / self.tpot_s[self.best]

    @property
    def over_plain(self) -> float:
        return self.tpot_s[ADAPTIVE] / self.tpot_s[PLAIN]

    @property
    def passed(self) -> bool:
        return self.over_best <= OVER_BEST and self.over_plain <= OVER_PLAIN


def rows(samples: Sequence[Sample]) -> list[Row]:
    """Returns a row per architecture and workload, in the order measured."""
    found: list[Row] = []
    for architecture in dict.fromkeys(s.architecture for s in samples if s.length != PLAIN):
        for workload in dict.fromkeys(s.workload for s in samples):
            of = [s for s in samples if s.workload == workload and s.architecture in (architecture, PLAIN)]
            by_length = {k: _tpot([s for s in of if s.length == k]) for k in dict.fromkeys(s.length for s in of)}
            drafted = [s.mean_draft_length for s in of if s.length == ADAPTIVE]
            found.append(Row(architecture, workload, by_length, statistics.fmean(drafted)))
    return found


def _tpot(samples: Sequence[Sample]) -> float:
    by_prompt: defaultdict[str, list[float]] = defaultdict(list)
    for sample in samples:
        by_prompt[sample.prompt].append(sample.tpot_s)
    return statistics.fmean(statistics.median(values) for values in by_prompt.values())


async def run(args: argparse.Namespace, say: Callable[[str], None], samples: list[Sample]) -> None:
    """Appends each answer to `samples` at once."""
    async with contextlib.AsyncExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="adaptive_length")))
        fleet = await stack.enter_async_context(Fleet(logs, concurrency=1))
        endpoints = await deploy(args.config, fleet, _describe)
        say("servers are ready")
        plain = baseline_of(endpoints)
        assert plain is not None
        turns = [(PLAIN, PLAIN, await _contender(stack, plain))]
        for endpoint in endpoints:
            if endpoint.architecture.name in SPECULATING:
                contender = await _contender(stack, endpoint)
                turns += [(contender.name, k, contender) for k in (*map(str, args.lengths), ADAPTIVE)]
        for turn in turns:  # and the adaptive length learns the cost of steps
            await _ask(args, *turn, args.prompts[0], 0)
        for i, (run_number, prompt) in enumerate((r, p) for r in range(args.runs) for p in args.prompts):
            at = i % len(turns)
            for turn in turns[at:] + turns[:at]:
                samples.append(await _ask(args, *turn, prompt, run_number))
            if len({s.token_ids for s in samples if s.prompt == prompt.name}) > 1:
                raise SystemExit(f"{prompt.name}: outputs differ between lengths")
            say(f"{prompt.name} done")


async def _describe(address: str, service: str) -> ModelInfo:
    async with GenerationClient.connect(address, service) as client:
        return await client.model_info()


async def _contender(stack: contextlib.AsyncExitStack, endpoint: Endpoint) -> Contender:
    client = await stack.enter_async_context(GenerationClient.connect(endpoint.reached, endpoint.architecture.service))
    return Contender(endpoint.architecture.name, client, timeout_s=300.0)


async def _ask(
    args: argparse.Namespace, architecture: str, length: str, contender: Contender, prompt: Prompt, run_number: int
) -> Sample:
    k = {ADAPTIVE: None, PLAIN: 0}[length] if length in (ADAPTIVE, PLAIN) else int(length)
    sampling = SamplingParams(args.temperature)
    request = GenerationRequest(text="", sampling=sampling, max_new_tokens=args.max_new_tokens, speculation_length=k)
    found = await measure(contender, prompt.into(request))
    return Sample(
        architecture,
        length,
        prompt.kind,
        prompt.name,
        run_number,
        found.tpot_s or 0.0,
        found.drafted / max(1, found.rounds),
        found.output_token_ids,
    )


def show(found: Sequence[Row], console: Console) -> None:
    table = Table(title="Milliseconds per token by speculation length", title_justify="left", padding=0)
    table.add_column("architecture, workload")
    lengths = list(found[0].tpot_s)
    for heading in (*lengths, "drafted", "best", "auto/best", "auto/plain", ""):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in found:
        table.add_row(
            f"{row.architecture}, {row.workload}",
            *(f"{1000 * row.tpot_s[k]:.2f}" for k in lengths),
            f"{row.mean_draft_length:.2f}",
            row.best,
            f"{row.over_best:.3f}",
            f"{row.over_plain:.3f}",
            "pass" if row.passed else "FAIL",
        )
    console.print(table)
    console.print(f"bars: auto/best at most {OVER_BEST}, auto/plain at most {OVER_PLAIN}", highlight=False)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m benchmarks.adaptive_length", description=(__doc__ or "").split("\n")[0])
    parser.flag("--architectures", default=FUSED.name, metavar="LIST", help="(default: %(default)s)")
    parser.flag("--lengths", default="0,1,2,3,5", metavar="LIST", help="fixed ones (default: %(default)s)")
    parser.flag("--max-new-tokens", type=positive, default=64, metavar="N", help="(default: 64)")
    parser.flag("--workloads", default=",".join(BUILT_IN), metavar="KINDS", help="(default: %(default)s)")
    parser.flag("--prompts-per-workload", type=positive, default=2, metavar="N", help="(default: 2)")
    parser.flag("--runs", type=positive, default=1, metavar="N", help="times every prompt is answered (default: 1)")
    parser.flag("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    parser.flag("--output", type=Path, default=Path("results/adaptive_length.json"), help="(default: %(default)s)")
    args = parser.parse_args(argv)
    try:
        args.lengths = [int(k) for k in args.lengths.split(",")]
        args.prompts = built_in_prompts(args.workloads.split(","), args.prompts_per_workload)
        args.config = ComparisonConfig(
            prompts=args.prompts,
            output_dir=args.output.parent,
            architectures=(AUTOREGRESSIVE.name, *args.architectures.split(",")),
            max_new_tokens=args.max_new_tokens,
            speculation_length=None,
        )
    except ValueError as error:
        parser.error(str(error))
    return args


def document(samples: Sequence[Sample]) -> dict[str, Any]:
    return {
        "machine": asdict(this_machine()),
        "rows": [
            {**asdict(row), "over_best": row.over_best, "over_plain": row.over_plain, "passed": row.passed}
            for row in rows(samples)
        ],
        "samples": [asdict(sample) for sample in samples],
    }


def main(argv: Sequence[str] | None = None) -> int:
    args, console = parse(argv), Console(width=140)
    samples: list[Sample] = []

    def raw() -> dict[str, Any]:
        return {"samples": [asdict(sample) for sample in samples]}

    with kept(args.output, lambda: document(samples), raw):
        asyncio.run(run(args, lambda text: print(text, file=sys.stderr), samples))
    found = rows(samples)
    show(found, console)
    console.print(f"machine: {this_machine()}; {args.max_new_tokens} tokens a prompt", highlight=False)
    return 0 if all(row.passed for row in found) else 1


if __name__ == "__main__":
    sys.exit(main())
