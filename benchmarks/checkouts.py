"""Compares the speed of several checkouts of Tandem: `python -m benchmarks.checkouts OTHER_CHECKOUT`.

Every round measures start-up, client start and decoding on each checkout, with this interpreter; the order rotates.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.arguments import Parser, positive
from benchmarks.contenders import Ours, encode
from benchmarks.figures import Sample, decoding
from benchmarks.keeping import kept
from tandem.comparison.measuring.machine import this_machine
from tandem.comparison.measuring.servers import Fleet
from tandem.comparison.measuring.timed_request import rotated
from tandem.comparison.measuring.workloads import built_in_prompts
from tandem.rpc.channel import DRAFT, FUSED
from tandem.rpc.generation_client import GenerationClient

LENGTH = ("--sequence_length", "512")
Prompts = Sequence[Sequence[int]]
HELP, START, CLIENT, PLAIN, DRAFTED, WAITING, REMOTE = (
    "main.py --help, s",
    "fused server, start to ready, s",
    "client, start to end, one token, s",
    "plain decoding, ms per token",
    "fused decoding, ms per token",
    "distributed, --pipeline off, ms per token",
    "distributed, ms per token",
)


@dataclass
class Checkout:
    """A checkout and its samples."""

    root: Path
    samples: dict[str, list[float]] = field(default_factory=dict)  # per measurement, one a round

    def add(self, what: str, value: float) -> None:
        self.samples.setdefault(what, []).append(value)

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, str(self.root / "main.py"), *arguments]


def timed(command: Sequence[str], folder: Path) -> float:
    """Returns a command's seconds. Raises CalledProcessError."""
    started = time.perf_counter()
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return time.perf_counter() - started


async def decode(
    address: str, speculation_length: int | None, prompts: Prompts, tokens: int, service: str = FUSED
) -> tuple[float, tuple[int, ...]]:
    """Decodes the prompts in turn. Returns their mean milliseconds per token after the first chunk, and all tokens."""
    means: list[float] = []
    outputs: list[int] = []
    async with GenerationClient.connect(address, service) as client:
        for prompt in prompts:
            a = await Ours("", client, speculation_length).answer(prompt, tokens)
            sample = Sample(str(speculation_length), "", "", 0, a.token_ids, a.seconds, a.first_seconds, a.first_tokens)
            if (milliseconds := decoding(sample)) is not None:  # None: all tokens came at once
                means.append(milliseconds)
            outputs += a.token_ids
    return statistics.mean(means), tuple(outputs)


async def measure(checkout: Checkout, prompts: Prompts, tokens: int, folder: Path) -> tuple[tuple[int, ...], ...]:
    """Adds one round of samples. Returns the tokens decoded plainly and with drafts."""
    checkout.add(HELP, timed(checkout.command("--help"), folder))
    async with Fleet(folder) as fleet:
        server = await fleet.start("fused", checkout.command("--role", "fused_target", "--port", "0", *LENGTH))
        checkout.add(START, server.startup_seconds)
        await decode(server.address, None, prompts[:1], 12)  # warms up
        asked = ("--port", str(server.port), "--prompt", "Hello", "--max_new_tokens", "1")
        checkout.add(CLIENT, timed(checkout.command("--role", "client", *asked), folder))
        outputs = []
        for what, length in ((PLAIN, 0), (DRAFTED, None)):
            ms, token_ids = await decode(server.address, length, prompts, tokens)
            checkout.add(what, ms)
            outputs.append(token_ids)
    for what, flags in ((WAITING, ("--pipeline", "off")), (REMOTE, ())):
        outputs.append(await distributed(checkout, what, flags, prompts, tokens, folder))
    return tuple(outputs)


async def distributed(
    checkout: Checkout, what: str, flags: Sequence[str], prompts: Prompts, tokens: int, folder: Path
) -> tuple[int, ...]:
    """Adds a sample of a draft worker with a target of its own checkout."""
    async with Fleet(folder) as fleet:
        target = await fleet.start("target", checkout.command("--role", "target", "--port", "0", *LENGTH))
        where = ("--target_host", "127.0.0.1", "--target_port", str(target.port))
        command = checkout.command("--role", "draft_worker", "--port", "0", *LENGTH, *where, *flags)
        worker = await fleet.start("draft_worker", command)
        await decode(worker.address, None, prompts[:1], 12, DRAFT)  # warms up
        ms, token_ids = await decode(worker.address, None, prompts, tokens, DRAFT)
    checkout.add(what, ms)
    return token_ids


async def run(checkouts: Sequence[Checkout], rounds: int, tokens: int, console: Console) -> None:
    """Measures every checkout in every round. Raises RuntimeError if tokens differ."""
    seen, prompts = set(), tuple(encode(built_in_prompts(per_workload=2)).values())
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(rounds):
            for checkout in rotated(checkouts, turn):
                seen |= set(await measure(checkout, prompts, tokens, Path(folder)))
            console.print(f"round {turn + 1} of {rounds}", highlight=False)
    if len(seen) != 1:
        raise RuntimeError(f"{len(seen)} different outputs of the same prompts: plain and drafted, of all checkouts")


def table(checkouts: Sequence[Checkout]) -> Table:
    """Builds each checkout's medians, and the median over rounds of the first one's ratio to the last one."""
    shown = Table(title="Medians, and (fastest) of each checkout", title_justify="left")
    shown.add_column("measured")
    for checkout in checkouts:
        shown.add_column(str(checkout.root), justify="right")
    shown.add_column("first / last", justify="right")
    for what in checkouts[0].samples:
        medians = [statistics.median(checkout.samples[what]) for checkout in checkouts]
        rounds = zip(checkouts[0].samples[what], checkouts[-1].samples[what], strict=True)
        ratio = statistics.median(first / last for first, last in rounds)
        cells = [f"{m:.2f} ({min(c.samples[what]):.2f})" for m, c in zip(medians, checkouts, strict=True)]
        shown.add_row(what, *cells, f"{ratio:.3f}")
    return shown


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(prog="checkouts", description=__doc__, allow_abbrev=False)
    parser.add_argument("others", nargs="+", type=Path, metavar="CHECKOUT", help="root of another checkout")
    parser.flag("--rounds", type=positive, default=5, metavar="N", help="(default: 5)")
    parser.flag("--max-new-tokens", type=positive, default=64, metavar="N", help="(default: 64)")
    output = Path("results/checkouts.json")
    parser.flag(
        "--output", type=Path, default=output, metavar="FILE", help="JSON with every sample (default: %(default)s)"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args, console = parse(argv), Console()
    checkouts = [Checkout(root.resolve()) for root in (Path(__file__).parents[1], *args.others)]

    def document() -> dict[str, object]:
        return {
            "machine": asdict(this_machine()),
            "samples": {str(checkout.root): checkout.samples for checkout in checkouts},
        }

    with kept(args.output, document, document):
        asyncio.run(run(checkouts, args.rounds, args.max_new_tokens, console))
    console.print(table(checkouts))


if __name__ == "__main__":
    main()
