"""Compares the pipelined loop with other ways to verify and with theory, on the embedded pair over an emulated link.

`python -m benchmarks.pipelined`. Draft workers that differ only in `--pipeline` share one target and get the same
prompts in turn, at every round trip and speculation length. A target that never waits (`--rule agreement` alone) is
measured too, and said is which of the three ways was the fastest. Theory is t_d + (1 - a)(RTT + t_v) and, for
stop-and-wait, (g t_d + RTT + t_v) / E, with the acceptance and the component times of the stop-and-wait requests of the
same cell.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.arguments import Parser, add_request_flags
from benchmarks.keeping import kept
from tandem.comparison.links.link import DelayLink
from tandem.comparison.links.settings import LinkSettings
from tandem.comparison.measuring.environment import these_versions, this_machine
from tandem.comparison.measuring.records import Measurement
from tandem.comparison.measuring.run import Contender, measure, rotated
from tandem.comparison.measuring.servers import Fleet
from tandem.comparison.measuring.workloads import Prompt, built_in_prompts
from tandem.launch import LAUNCH
from tandem.rpc.generation_client import GenerationClient
from tandem.speculation.request import Rule
from tandem.speculation.theory import StepCosts, expected_tokens, rate_for, tpot_pipelined
from tandem.speculation.types import GenerationRequest, SamplingParams

MODES = ("off", "on", "auto")
NEVER = "never-waiting"
WAYS = ("off", "on", NEVER)
ALLOWED = 1.15


@dataclass(frozen=True, slots=True)
class Cell:
    """One round trip and speculation length. Seconds; `tpot_s` by mode; `rtt_s` as set and with what a call costs."""

    rtt_ms: float
    length: int
    tpot_s: dict[str, float]
    acceptance: float
    draft_s: float
    verify_s: float
    rtt_s: float
    stale_share: dict[str, float]
    mean_in_flight: dict[str, float]
    identical: bool

    @property
    def costs(self) -> StepCosts:
        return StepCosts(self.draft_s, self.verify_s, self.verify_s)

    @property
    def bound_s(self) -> float:
        """The predicted TPOT of pipelining at the round trip as set, without what a call costs beyond that."""
        return tpot_pipelined(self.costs, self.acceptance, self.rtt_ms / 1000)

    @property
    def fastest(self) -> str:
        """The way of the least time per token: `auto` is none of its own."""
        return min((way for way in WAYS if way in self.tpot_s), key=self.tpot_s.__getitem__)

    @property
    def stop_and_wait_s(self) -> float:
        step = self.length * self.draft_s + self.rtt_ms / 1000 + self.verify_s
        return step / expected_tokens(self.acceptance, self.length)


def cell(rtt_ms: float, length: int, found: dict[str, list[Measurement]]) -> Cell:
    """Computes a cell from the requests of each mode, in the same order."""
    off = found["off"]
    rounds, drafted = sum(m.rounds for m in off), sum(m.drafted for m in off)
    outputs = {mode: [m.output_token_ids for m in ms] for mode, ms in found.items()}
    return Cell(
        rtt_ms,
        length,
        {mode: _tpot(ms) for mode, ms in found.items()},
        rate_for(sum(m.output_tokens for m in off) / rounds, length),
        sum(m.seconds_by_cause.draft for m in off) / drafted,
        sum(m.seconds_by_cause.verify + m.seconds_by_cause.queue for m in off) / rounds,
        sum(m.seconds_by_cause.network for m in off) / rounds,
        {mode: sum(m.stale_rounds for m in ms) / sum(m.rounds for m in ms) for mode, ms in found.items()},
        {mode: _mean_in_flight(ms) for mode, ms in found.items()},
        all(tokens == outputs["off"] for tokens in outputs.values()),
    )


def _tpot(measurements: Sequence[Measurement]) -> float:
    seconds = sum(m.end_to_end_latency_s - m.ttft_s for m in measurements)
    return seconds / sum(m.output_tokens - 1 for m in measurements)


def _mean_in_flight(measurements: Sequence[Measurement]) -> float:
    sent = [(i + 1, n) for m in measurements for i, n in enumerate(m.sent_by_depth)]
    return sum(depth * n for depth, n in sent) / sum(n for _, n in sent) if sent else 1.0


async def run(arguments: argparse.Namespace, cells: list[Cell]) -> None:
    """Appends each cell to `cells` as soon as it is measured."""
    prompts = built_in_prompts(per_workload=arguments.prompts_per_workload)
    async with contextlib.AsyncExitStack() as stack:
        logs = stack.enter_context(tempfile.TemporaryDirectory(prefix="pipelined"))
        fleet = await stack.enter_async_context(Fleet(Path(logs)))
        link = await stack.enter_async_context(DelayLink())
        contenders = await _start(stack, fleet, link, arguments)
        for length in arguments.lengths:
            for rtt_ms in arguments.rtt_ms:
                await link.set(LinkSettings(rtt_ms=rtt_ms))
                cells.append(cell(rtt_ms, length, await _measured(contenders, prompts, length, arguments)))
                print(f"measured {rtt_ms:g} ms, k = {length}", file=sys.stderr)


async def _start(
    stack: contextlib.AsyncExitStack, fleet: Fleet, link: DelayLink, arguments: argparse.Namespace
) -> list[Contender]:
    longest = str(max(arguments.lengths))
    common = ["--port", "0", "--speculation_length", longest, "--backend", arguments.backend]
    common += ["--sequence_length", "512", "--prefix_sharing", "off"]  # each mode processes its prompts
    common += ["--dtype", arguments.dtype] if arguments.backend != "toy" else []
    target = await fleet.start("target", [*LAUNCH, "--role", "target", *common])
    host, _, port = (await link.listen(target.address)).rpartition(":")
    contenders = []
    for mode in MODES + (NEVER,) * (arguments.rule == "agreement"):
        worker = [*LAUNCH, "--role", "draft_worker", *common, "--draft", arguments.draft]
        worker += ["--target_host", host, "--target_port", port, "--pipeline", mode]
        server = await fleet.start(mode, worker)
        client = await stack.enter_async_context(GenerationClient.connect(server.address, "DraftWorker"))
        contenders.append(Contender(mode, client, split=True))
    return contenders


async def _measured(
    contenders: Sequence[Contender], prompts: Sequence[Prompt], length: int, arguments: argparse.Namespace
) -> dict[str, list[Measurement]]:
    request = GenerationRequest(
        text="",
        sampling=SamplingParams(arguments.temperature, seed=arguments.seed),
        max_new_tokens=arguments.max_new_tokens,
        speculation_length=length,
        rule=Rule[arguments.rule.upper()],
    )
    for contender in contenders:
        await measure(contender, prompts[0].into(request))
    found: dict[str, list[Measurement]] = {contender.name: [] for contender in contenders}
    for turn, prompt in enumerate(prompts * arguments.runs):
        for contender in rotated(contenders, turn):
            found[contender.name].append(await measure(contender, prompt.into(request)))
    return found


def table(cells: Sequence[Cell]) -> Table:
    """`call`: what a call costs beyond the round trip as set. Theory of `off` is stop-and-wait's."""
    shown = Table(title="TPOT in ms, and over the bound t_d + (1 - a)(RTT + t_v)")
    for heading in (
        "RTT", "k", "a", "t_d", "t_v", "call", "bound", "off", "on", "auto", "off/\ntheory", "on/\nbound",
        "auto/\nbound", "off/\nauto", "in\nflight", "stale/\nround", "never\nwaiting", "fastest", "same\ntokens",
    ):  # fmt: skip
        shown.add_column(heading, justify="right")
    for c in cells:
        off, on, auto = (c.tpot_s[mode] for mode in MODES)
        times = (c.draft_s, c.verify_s, c.rtt_s - c.rtt_ms / 1000, c.bound_s, off, on, auto)
        ratios = (off / c.stop_and_wait_s, on / c.bound_s, auto / c.bound_s, off / auto)
        shown.add_row(
            f"{c.rtt_ms:g}",
            str(c.length),
            f"{c.acceptance:.3f}",
            *(f"{1000 * seconds:.1f}" for seconds in times),
            *(f"{ratio:.2f}" for ratio in (*ratios, c.mean_in_flight["auto"], c.stale_share["auto"])),
            f"{1000 * c.tpot_s[NEVER]:.1f}" if NEVER in c.tpot_s else "-",
            c.fastest,
            "yes" if c.identical else "NO",
        )
    return shown


def verdict(cells: Sequence[Cell]) -> str:
    """Compares with the bar, at the best length of each round trip."""
    lines = []
    for rtt in dict.fromkeys(c.rtt_ms for c in cells):
        here = [c for c in cells if c.rtt_ms == rtt]
        best = min(here, key=lambda c: c.tpot_s["auto"])
        waiting = min(c.tpot_s["off"] for c in here)
        ratio = best.tpot_s["auto"] / best.bound_s
        lines.append(
            f"RTT {rtt:g} ms: auto at k = {best.length} takes {ratio:.2f} of its bound"
            f" ({'within' if ratio <= ALLOWED else 'above'} {ALLOWED}),"
            f" {waiting / best.tpot_s['auto']:.2f} times as fast as the best stop-and-wait"
        )
    return "\n".join(lines)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m benchmarks.pipelined", description=__doc__)
    parser.flag("--rtt-ms", type=float, nargs="+", default=[0.0, 20.0, 50.0, 100.0], metavar="MS")
    parser.flag("--lengths", type=int, nargs="+", default=[3], metavar="K", help="speculation lengths (default 3)")
    parser.flag(
        "--rule", choices=("agreement", "rejection"), default="agreement", help="rejection samples: set --temperature"
    )
    add_request_flags(parser)
    parser.flag("--output", type=Path, metavar="FILE", help="write every cell as JSON")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    cells: list[Cell] = []

    def document() -> dict[str, Any]:
        return {
            "machine": asdict(this_machine()),
            "versions": asdict(these_versions()),
            "cells": [{**asdict(c), "bound_s": c.bound_s, "stop_and_wait_s": c.stop_and_wait_s} for c in cells],
        }

    def raw() -> dict[str, Any]:
        return {"cells": [asdict(c) for c in cells]}

    with kept(arguments.output, document, raw) if arguments.output else contextlib.nullcontext():
        asyncio.run(run(arguments, cells))
    Console(width=160).print(table(cells))
    print(verdict(cells))
    return 0


if __name__ == "__main__":
    sys.exit(main())
