"""Compares a target that never waits with plain decoding served over the same link, and with the ways that wait.

`python -m benchmarks.never_waiting`. A target behind an emulated link answers plain requests itself, and draft workers
that differ only in `--pipeline`; all get the same prompts in turn. Printed is the median over paired requests of the
time per output token, as a ratio to plain decoding's, for each round trip and workload. The simulation is given what
was measured in the run itself (never_waiting_inputs.py). The draft workers share the target's cores, so that a step
beside drafting takes longer than the simulation knows; `--target-cores` and `--draft-cores` keep them apart, and this
process, which is client and link, on the draft workers' cores.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.arguments import Parser, add_request_flags
from benchmarks.keeping import kept
from benchmarks.never_waiting_inputs import (
    drafter_of,
    ranks,
    round_trip_seconds,
    step_seconds,
)
from benchmarks.never_waiting_rows import PLAIN, Row, row, table, verdict
from tandem.comparison.links.link import DelayLink
from tandem.comparison.links.settings import LinkSettings
from tandem.comparison.measuring.environment import these_versions, this_machine
from tandem.comparison.measuring.records import Measurement
from tandem.comparison.measuring.run import Contender, measure, rotated
from tandem.comparison.measuring.servers import Fleet
from tandem.comparison.measuring.workloads import Prompt, built_in_prompts
from tandem.launch import LAUNCH
from tandem.rpc.generation_client import GenerationClient
from tandem.speculation.types import GenerationRequest, SamplingParams

WAITING = "off"
MODES = (WAITING, "on", "never-waiting", "auto")


async def run(arguments: argparse.Namespace, rows: list[Row], requests: list[dict[str, Any]]) -> None:
    """Appends the rows of a round trip to `rows`, and its requests to `requests`, as soon as it is measured."""
    prompts = built_in_prompts(per_workload=arguments.prompts_per_workload)
    if arguments.workloads:
        prompts = tuple(prompt for prompt in prompts if prompt.kind in arguments.workloads)
    async with contextlib.AsyncExitStack() as stack:
        link, contenders = await start(stack, arguments)
        sequences, step = await _inputs(contenders, prompts, arguments)
        for rtt_ms in arguments.rtt_ms:
            await link.set(LinkSettings(rtt_ms=rtt_ms))
            chosen_ways = [one for one in contenders if one.name in (PLAIN, *arguments.modes)]
            waiting = next(one for one in contenders if one.name == WAITING)
            round_trip = await round_trip_seconds(waiting, request_of(arguments), prompts[:2])
            asked, found = await _measured(chosen_ways, prompts, arguments)
            requests += [
                {"rtt_ms": rtt_ms, "mode": mode, "prompt": prompt.name, **asdict(one)}
                for mode, ones in found.items()
                for prompt, one in zip(asked, ones, strict=True)
            ]
            for workload in (*dict.fromkeys(prompt.kind for prompt in asked), "all"):
                chosen = [i for i, prompt in enumerate(asked) if workload in (prompt.kind, "all")]
                here = {mode: [ms[i] for i in chosen] for mode, ms in found.items()}
                rows.append(
                    row(rtt_ms, workload, here, [sequences[i % len(prompts)] for i in chosen], step, round_trip)
                )
            print(f"measured {rtt_ms:g} ms", file=sys.stderr)


def _backend(arguments: argparse.Namespace) -> list[str]:
    return ["--backend", arguments.backend, *(["--dtype", arguments.dtype] if arguments.backend != "toy" else [])]


def _drafts(arguments: argparse.Namespace) -> list[str]:
    """Returns the flags of a draft worker that choose its drafter."""
    return [*_backend(arguments), "--draft", arguments.draft, *arguments.draft_args]


def _on(cores: str | None) -> list[str]:
    return ["taskset", "--cpu-list", cores] if cores else []


def _cores(text: str) -> set[int]:
    """Returns the cores of a list such as 0,2-3."""
    ranges = [part.partition("-") for part in text.split(",")]
    return {core for first, _, last in ranges for core in range(int(first), int(last or first) + 1)}


def _core_list(text: str) -> str:
    """Checks a list of cores."""
    try:
        _cores(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of cores, such as 0 or 0,2-3") from None
    return text


async def start(stack: contextlib.AsyncExitStack, arguments: argparse.Namespace) -> tuple[DelayLink, list[Contender]]:
    """Starts the target, the link to it, and a draft worker for each mode; `stack` ends them."""
    logs = stack.enter_context(tempfile.TemporaryDirectory(prefix="never-waiting"))
    fleet = await stack.enter_async_context(Fleet(Path(logs)))
    link = await stack.enter_async_context(DelayLink())
    common = ["--port", "0", "--sequence_length", "512", "--prefix_sharing", "off"]  # each way processes its prompts
    serving = ["--role", "target", *common, *_backend(arguments), *arguments.target_args]
    target = await fleet.start("target", [*_on(arguments.target_cores), *LAUNCH, *serving])
    address = await link.listen(target.address)
    host, _, port = address.rpartition(":")
    client = await stack.enter_async_context(GenerationClient.connect(address, "TargetVerifier"))
    contenders = [Contender(PLAIN, client, split=False)]
    for mode in dict.fromkeys((WAITING, *arguments.modes)):
        worker = [*_on(arguments.draft_cores), *LAUNCH, "--role", "draft_worker", *common, *_drafts(arguments)]
        worker += ["--target_host", host, "--target_port", port, "--pipeline", mode]
        server = await fleet.start(mode, worker)
        client = await stack.enter_async_context(GenerationClient.connect(server.address, "DraftWorker"))
        contenders.append(Contender(mode, client, split=True))
    return link, contenders


def request_of(arguments: argparse.Namespace) -> GenerationRequest:
    """Builds the request that is sent with every prompt."""
    sampling = SamplingParams(arguments.temperature, seed=arguments.seed)
    return GenerationRequest(text="", sampling=sampling, max_new_tokens=arguments.max_new_tokens)


async def _inputs(
    contenders: Sequence[Contender], prompts: Sequence[Prompt], arguments: argparse.Namespace
) -> tuple[list[list[int]], Callable[[int], float]]:
    """Returns the ranks of the drafter's choices for each prompt, and the seconds of a step by its tokens."""
    request, by_name = request_of(arguments), {contender.name: contender for contender in contenders}
    found = [await measure(by_name[PLAIN], prompt.into(request)) for prompt in prompts]
    plain = sum(m.seconds_by_cause.verify for m in found) / sum(m.rounds for m in found)
    step = await step_seconds(by_name[WAITING], request, prompts[:: max(1, len(prompts) // 5)], plain)
    client = by_name[PLAIN].generator
    assert isinstance(client, GenerationClient), "what asks the target describes its model"
    vocab_size = (await client.model_info()).vocab_size
    async with drafter_of(_drafts(arguments)) as drafting:
        sequences = [
            await ranks(drafting, prompt, m.output_token_ids, request.sampling, vocab_size)
            for prompt, m in zip(prompts, found, strict=True)
        ]
    return sequences, step


async def _measured(
    contenders: Sequence[Contender], prompts: Sequence[Prompt], arguments: argparse.Namespace
) -> tuple[list[Prompt], dict[str, list[Measurement]]]:
    request = request_of(arguments)
    for contender in contenders:  # what adapts, adapts to the link first
        for prompt in prompts[: arguments.warm_up]:
            await measure(contender, prompt.into(request))
    found: dict[str, list[Measurement]] = {contender.name: [] for contender in contenders}
    asked = list(prompts) * arguments.runs
    for turn, prompt in enumerate(asked):
        for contender in rotated(contenders, turn):
            found[contender.name].append(await measure(contender, prompt.into(request)))
    return asked, found


def parser(prog: str, description: str | None) -> Parser:
    """Returns a parser of the flags that choose what is started and asked."""
    parser = Parser(prog=prog, description=description)
    parser.flag("--rtt-ms", type=float, nargs="+", default=[0.0, 20.0, 50.0, 100.0, 200.0], metavar="MS")
    parser.flag(
        "--modes",
        nargs="+",
        default=list(MODES),
        metavar="MODE",
        help="values of --pipeline",
    )
    parser.flag(
        "--target-cores", type=_core_list, metavar="CORES", help="cores of the target, such as 0-3 (default: all)"
    )
    parser.flag("--draft-cores", type=_core_list, metavar="CORES", help="cores of each draft worker (default: all)")
    parser.flag("--workloads", nargs="*", default=[], metavar="NAME")
    parser.flag("--warm-up", type=int, default=3, metavar="N", help="requests before the measured ones (default 3)")
    add_request_flags(parser)
    parser.flag("--target-args", nargs="*", default=[], metavar="ARG", help="further flags of the target")
    parser.flag("--draft-args", nargs="*", default=[], metavar="ARG", help="further flags of the draft workers")
    parser.flag("--output", type=Path, metavar="FILE", help="write every row as JSON")
    return parser


def keep_apart(arguments: argparse.Namespace) -> None:
    """Pins this process, which runs the clients and the link, to the draft workers' cores."""
    if arguments.draft_cores:
        os.sched_setaffinity(0, _cores(arguments.draft_cores))


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser("python -m benchmarks.never_waiting", __doc__).parse_args(argv)
    rows: list[Row] = []
    asked: list[dict[str, Any]] = []
    keep_apart(arguments)

    def document() -> dict[str, Any]:
        about = {"machine": asdict(this_machine()), "versions": asdict(these_versions())}
        return {**about, "rows": [asdict(r) for r in rows], "requests": asked}

    with kept(arguments.output, document, document) if arguments.output else contextlib.nullcontext():
        asyncio.run(run(arguments, rows, asked))
    Console(width=170).print(table(rows))
    print(verdict(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
