"""Measures prefill apart from decode against prefilling in place: `python -m benchmarks.prefill_apart`.

One request decodes while new prompts arrive one after the other, at each of these in turn, in an order that changes:

    in place            a target on one core
    in place, 2 cores   the same hardware as apart: a target with two threads on two cores
    apart               a target on core 0, and a PrefillWorker on core 1 that computes the new prompts
    apart, simulated    the same, through a proxy that delays and limits the bandwidth (simulated: no real network)

All processes are on this machine, over loopback, and so is the client, which takes its share of the cores. Prompts are
random tokens, new ones in every run and the same for all; nothing is kept of them. Compared are the time to first token
of the new prompts, and the gaps between the tokens of the request that runs. The file that it writes is what
`--role advise --report` reads to say where this pays.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.arguments import Parser, positive
from benchmarks.contenders import Answered, Ours
from benchmarks.figures import quantile
from benchmarks.keeping import kept
from tandem.comparison.links.link import DelayLink
from tandem.comparison.links.settings import LinkSettings
from tandem.comparison.measuring.environment import these_versions, this_machine
from tandem.comparison.measuring.servers import Fleet, Server
from tandem.launch import LAUNCH
from tandem.rpc.channel import TARGET, open_channel
from tandem.rpc.generation_client import GenerationClient
from tandem.speculation.types import Chunk, GenerationRequest
from tandem.v1 import prefill_worker_pb2 as pb
from tandem.v1.prefill_worker_pb2_grpc import PrefillWorkerStub

IN_PLACE, TWO_CORES, APART, SIMULATED = "in place", "in place, 2 cores", "apart", "apart, simulated link"
CHUNK = 64
APART_SECONDS = 0.25
"""Seconds between two new prompts."""
COMPARED = 24
"""Tokens of the running request that all sides must agree on."""


@dataclass(frozen=True)
class Settings:
    """The settings of one run. The link is that of the simulated side; rtt_ms 0 and mbps None: there is none."""

    runs: int
    prompt_tokens: int
    new_tokens: int
    weights: str
    rtt_ms: float
    link_mbps: float | None
    output: Path


@dataclass
class Side:
    """What one side did. Seconds: to first token of new prompts, beside a request that runs and alone; gaps of that
    request while a new prompt was waited for, and while there was none."""

    first_beside: list[float] = field(default_factory=list)
    first_alone: list[float] = field(default_factory=list)
    gaps_beside: list[float] = field(default_factory=list)
    gaps_alone: list[float] = field(default_factory=list)


@dataclass
class Outcome:
    """All sides, and whether they gave the same tokens. `page_bytes`: of 16 tokens."""

    sides: dict[str, Side] = field(default_factory=dict)
    same: int = 0
    asked: int = 0
    page_bytes: int = 0
    page_tokens: int = 16


@dataclass
class Running:
    """The request that decodes: its tokens, and when they came."""

    tokens: list[int] = field(default_factory=list)
    came: list[float] = field(default_factory=list)

    async def decode(self, server: Ours, prompt: Sequence[int], count: int) -> None:
        """Decodes until it is cancelled. Raises RuntimeError if the request ends before."""
        request = GenerationRequest(
            token_ids=tuple(prompt), max_new_tokens=count, speculation_length=0, ignore_end_of_sequence=True
        )
        async with contextlib.aclosing(server.client.generate(request)) as events:
            async for event in events:
                if isinstance(event, Chunk) and event.token_ids:
                    self.tokens += event.token_ids
                    self.came.append(time.perf_counter())
        raise RuntimeError(f"{server.name}: the running request ended before the new prompts; raise --new-tokens")


async def beside(
    server: Ours, prompt: Sequence[int], newcomers: Sequence[Sequence[int]], count: int
) -> tuple[Side, list[tuple[int, ...]]]:
    """Decodes `prompt`, while the newcomers come one after the other; returns what was measured, and the tokens."""
    waits, tokens, side, running = list[tuple[float, float]](), list[tuple[int, ...]](), Side(), Running()
    decoding = asyncio.ensure_future(running.decode(server, prompt, count))
    try:
        for newcomer in newcomers:
            await asyncio.sleep(APART_SECONDS)
            sent = time.perf_counter()
            answered = await server.answer(newcomer, 1)
            waits.append((sent, time.perf_counter()))
            side.first_beside.append(answered.first_seconds)
            tokens.append(answered.token_ids)
        while len(running.tokens) < COMPARED and not decoding.done():
            await asyncio.sleep(0.01)
        if decoding.done():
            decoding.result()
    finally:
        decoding.cancel()
        await asyncio.gather(decoding, return_exceptions=True)
    for before, after in itertools.pairwise(running.came):
        meets = any(before < end and after > start for start, end in waits)
        (side.gaps_beside if meets else side.gaps_alone).append(after - before)
    return side, [*tokens, tuple(running.tokens[:COMPARED])]


async def alone(server: Ours, prompt: Sequence[int]) -> Answered:
    return await server.answer(prompt, 1)


async def measure(settings: Settings, outcome: Outcome, servers: dict[str, Ours], size: int) -> None:
    chance = random.Random(7)
    for run in range(settings.runs + 1):  # the first one warms up
        running = [chance.randrange(size) for _ in range(24)]
        prompts = [[chance.randrange(size) for _ in range(settings.prompt_tokens)] for _ in range(4)]
        names = list(servers)
        said = {}
        for name in names[run % len(names) :] + names[: run % len(names)]:
            lone = await alone(servers[name], prompts[0])
            found, tokens = await beside(servers[name], running, prompts[1:], settings.new_tokens)
            said[name] = [lone.token_ids, *tokens]
            if run:
                side = outcome.sides.setdefault(name, Side())
                side.first_alone.append(lone.first_seconds)
                for part in ("first_beside", "gaps_beside", "gaps_alone"):
                    getattr(side, part).extend(getattr(found, part))
        outcome.asked += 1
        outcome.same += len({str(each) for each in said.values()}) == 1
        print(f"run {run} of {settings.runs}", file=sys.stderr)


def report(outcome: Outcome, settings: Settings) -> list[str]:
    lines, base = [], outcome.sides.get(IN_PLACE)
    for name in (name for name in (IN_PLACE, TWO_CORES, APART, SIMULATED) if name in outcome.sides):
        side = outcome.sides[name]
        first = 1000 * statistics.median(side.first_beside)
        lone = 1000 * statistics.median(side.first_alone)
        during, without = ([1000 * gap for gap in gaps] for gaps in (side.gaps_beside, side.gaps_alone))
        p50, p99, usual = quantile(during, 0.5), quantile(during, 0.99), quantile(without, 0.5)
        line = f"{name:22} first token {first:7.1f} ms (alone {lone:7.1f}); gaps meanwhile p50 {p50:6.1f} ms, "
        line += f"p99 {p99:6.1f}; without a new prompt p50 {usual:5.1f}"
        if base and side is not base:
            ratios = (
                statistics.median(side.first_beside) / statistics.median(base.first_beside),
                quantile(side.gaps_beside, 0.5) / quantile(base.gaps_beside, 0.5),
                quantile(side.gaps_beside, 0.99) / quantile(base.gaps_beside, 0.99),
            )
            line += "; ratios to in place: first token {:.2f}, gaps p50 {:.2f}, p99 {:.2f}".format(*ratios)
        lines.append(line)
    pages = (settings.prompt_tokens - 1) // outcome.page_tokens
    lines.append(
        f"bytes of a prompt's pages: {pages * outcome.page_bytes / 1e6:.1f} MB for {pages * outcome.page_tokens} tokens"
    )
    lines.append(f"same tokens on all sides: {outcome.same}/{outcome.asked} runs")
    return lines


def costs(outcome: Outcome, settings: Settings) -> dict[str, float]:
    """Returns the measured costs that `--role advise` reads. Seconds are medians."""
    base, apart = outcome.sides[IN_PLACE], outcome.sides[APART]
    return {
        "prompt_tokens": settings.prompt_tokens,
        "chunk_tokens": CHUNK,
        "in_place_s": statistics.median(base.first_alone),
        "in_place_beside_s": statistics.median(base.first_beside),
        "apart_s": statistics.median(apart.first_alone),
        "apart_beside_s": statistics.median(apart.first_beside),
        "gap_s": statistics.median(base.gaps_alone),
        "gap_in_place_s": statistics.median(base.gaps_beside),
        "gap_apart_s": statistics.median(apart.gaps_beside),
        "bytes_per_token": outcome.page_bytes / outcome.page_tokens,
    }


@contextlib.asynccontextmanager
async def contenders(settings: Settings, outcome: Outcome, fleet: Fleet) -> AsyncIterator[tuple[dict[str, Ours], int]]:
    """Starts the servers of all sides; yields them by side, and the size of the vocabulary."""
    length = str(settings.prompt_tokens + settings.new_tokens + 32)
    shape = ("--device", "cpu", "--port", "0", "--batch", "2", "--sequence_length", length, "--prefix_sharing", "off")
    common = (*shape, "--weights", settings.weights, "--prefill_chunk", str(CHUNK))
    one, other = ("--threads", "1", "--cores", "0"), ("--threads", "1", "--cores", "1")

    async def target(name: str, *flags: str) -> Server:
        return await fleet.start(name, [*LAUNCH, "--role", "target", *common, *flags])

    async with contextlib.AsyncExitStack() as stack:
        worker = await fleet.start("prefill", [*LAUNCH, "--role", "prefill", *common, *other])
        async with open_channel(worker.address) as channel:
            info = await PrefillWorkerStub(channel).GetModelInfo(pb.PrefillWorkerGetModelInfoRequest())
        outcome.page_bytes, outcome.page_tokens = info.layout.page_bytes, info.layout.page_tokens
        waits = ("--prefill_min_tokens", "64", "--prefill_timeout_s", "60")
        started = {
            IN_PLACE: await target("in-place", *one),
            TWO_CORES: await target("two-cores", "--threads", "2", "--cores", "0-1"),
            APART: await target("apart", *one, "--prefill", worker.address, *waits),
        }
        if settings.rtt_ms or settings.link_mbps:
            link = await stack.enter_async_context(DelayLink())
            await link.set(LinkSettings(settings.rtt_ms, settings.link_mbps))
            address = await link.listen(worker.address)
            started[SIMULATED] = await target("simulated", *one, "--prefill", address, *waits)
        servers = {}
        for name, server in started.items():
            client = await stack.enter_async_context(GenerationClient.connect(server.address, TARGET))
            servers[name] = Ours(name, client, 0)
        yield servers, int(info.model.vocab_size)


def parse(argv: Sequence[str] | None = None) -> Settings:
    parser = Parser(prog="prefill_apart", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.flag("--runs", type=positive, default=6, metavar="N", help="of all sides (default: 6)")
    parser.flag("--prompt-tokens", type=positive, default=400, metavar="N", help="of a new prompt (default: 400)")
    parser.flag(
        "--new-tokens", type=positive, default=1000, metavar="N", help="most of the one that runs (default: 1000)"
    )
    parser.flag("--weights", default="auto", help="(default: auto)")
    parser.flag("--rtt-ms", type=float, default=1.0, help="of the simulated link (default: 1)")
    parser.flag("--link-mbps", type=float, help="bandwidth of the simulated link (default: no limit)")
    parser.flag("--output", type=Path, default=Path("results/prefill_apart.json"), help="(default: %(default)s)")
    return Settings(**vars(parser.parse_args(argv)))


async def run(settings: Settings, outcome: Outcome) -> None:
    async with (
        Fleet(settings.output.parent / "prefill_apart_logs") as fleet,
        contenders(settings, outcome, fleet) as (servers, size),
    ):
        await measure(settings, outcome, servers, size)


def main(argv: Sequence[str] | None = None) -> int:
    settings, outcome = parse(argv), Outcome()
    document = lambda: {  # noqa: E731
        "settings": asdict(settings),
        "machine": asdict(this_machine()),
        "versions": asdict(these_versions()),
        "measured": asdict(outcome),
        "prefill_costs": costs(outcome, settings),
        "report": report(outcome, settings),
    }
    with kept(settings.output, document, lambda: asdict(outcome)):
        asyncio.run(run(settings, outcome))
    print("\n".join(report(outcome, settings)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
