"""Compares the tokens per second of several clients at one target, by the way in which their drafts are verified.

`python -m benchmarks.never_waiting_load`. A target behind an emulated link answers the same requests, `--clients` at a
time, asked by draft workers that differ only in `--pipeline`, and by clients that ask it plainly. The modes take turns,
`--runs` times. Printed are all tokens per second, and the median over the turns of the ratio to stop-and-wait's.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.arguments import positive
from benchmarks.keeping import kept
from benchmarks.never_waiting import WAITING, keep_apart, request_of, start
from benchmarks.never_waiting import parser as single_parser
from tandem.comparison.links.settings import LinkSettings
from tandem.comparison.measuring.environment import these_versions, this_machine
from tandem.comparison.measuring.records import Measurement
from tandem.comparison.measuring.run import Contender, measure, rotated
from tandem.comparison.measuring.workloads import Prompt, built_in_prompts


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of one mode: all requests, `clients` at a time. `seconds`: from the first request to the last answer."""

    rtt_ms: float
    mode: str
    run: int
    requests: int
    tokens: int
    seconds: float
    rounds: int
    identical: bool

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


async def run(arguments: argparse.Namespace, turns: list[Turn]) -> None:
    """Appends each turn to `turns` as soon as it is measured."""
    prompts = built_in_prompts(per_workload=arguments.prompts_per_workload)
    async with contextlib.AsyncExitStack() as stack:
        link, contenders = await start(stack, arguments)
        for rtt_ms in arguments.rtt_ms:
            await link.set(LinkSettings(rtt_ms=rtt_ms))
            truth: list[tuple[int, ...]] = []
            for number in range(-1, arguments.runs):  # the first turn is not counted: what adapts, adapts
                for contender in contenders if number < 1 else rotated(contenders, number):
                    began = time.perf_counter()
                    found = await _at_once(contender, prompts, arguments)
                    seconds = time.perf_counter() - began
                    outputs = [tuple(m.output_token_ids) for m in found]
                    truth = truth or outputs
                    if number >= 0:
                        turns.append(_turn(rtt_ms, contender.name, number, found, seconds, outputs == truth))
            print(f"measured {rtt_ms:g} ms", file=sys.stderr)


def _turn(rtt_ms: float, mode: str, number: int, found: Sequence[Measurement], seconds: float, identical: bool) -> Turn:
    tokens, rounds = sum(m.output_tokens for m in found), sum(m.rounds for m in found)
    return Turn(rtt_ms, mode, number, len(found), tokens, seconds, rounds, identical)


async def _at_once(contender: Contender, prompts: Sequence[Prompt], arguments: argparse.Namespace) -> list[Measurement]:
    """Asks for every prompt, `clients` at a time, and returns the measurements in the order of the prompts."""
    request, places = request_of(arguments), asyncio.Semaphore(arguments.clients)

    async def one(prompt: Prompt) -> Measurement:
        async with places:
            return await measure(contender.apart(), prompt.into(request))

    return await asyncio.gather(*map(one, prompts))


def ratios(turns: Sequence[Turn], rtt_ms: float, mode: str) -> list[float]:
    """Returns, by turn, a mode's tokens per second as a ratio to stop-and-wait's."""
    rates = {(turn.mode, turn.run): turn.rate for turn in turns if turn.rtt_ms == rtt_ms}
    runs = sorted(run for found, run in rates if found == mode)
    return [rates[mode, run] / rates[WAITING, run] for run in runs]


def table(turns: Sequence[Turn], clients: int) -> Table:
    shown = Table(title=f"{clients} clients at one target: all their tokens per second")
    for heading in ("RTT", "mode", "turns", "tokens/s", "over stop-and-wait", "steps/token", "same tokens"):
        shown.add_column(heading, justify="right")
    for rtt_ms, mode in dict.fromkeys((turn.rtt_ms, turn.mode) for turn in turns):
        these = [turn for turn in turns if (turn.rtt_ms, turn.mode) == (rtt_ms, mode)]
        shown.add_row(
            f"{rtt_ms:g}",
            mode,
            str(len(these)),
            f"{statistics.median(turn.rate for turn in these):.0f}",
            f"{statistics.median(ratios(turns, rtt_ms, mode)):.2f}",
            f"{sum(turn.rounds for turn in these) / sum(turn.tokens for turn in these):.2f}",
            "yes" if all(turn.identical for turn in these) else "NO",
        )
    return shown


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = single_parser("python -m benchmarks.never_waiting_load", __doc__)
    parser.flag("--clients", type=positive, default=8, metavar="N", help="requests at a time (default 8)")
    parser.set_defaults(
        rtt_ms=[0.0, 20.0, 50.0], prompts_per_workload=5, runs=5, modes=[WAITING, "never-waiting", "auto"]
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    turns: list[Turn] = []
    keep_apart(arguments)

    def document() -> dict[str, Any]:
        about = {"machine": asdict(this_machine()), "versions": asdict(these_versions())}
        return {**about, "clients": arguments.clients, "turns": [asdict(turn) for turn in turns]}

    with kept(arguments.output, document, document) if arguments.output else contextlib.nullcontext():
        asyncio.run(run(arguments, turns))
    Console(width=120).print(table(turns, arguments.clients))
    return 0


if __name__ == "__main__":
    sys.exit(main())
