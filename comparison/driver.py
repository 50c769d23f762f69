"""One comparison from start to finish: servers, clients, warm-up, measurements, files, table."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Protocol

from rich.console import Console

from comparison.architectures import AUTOREGRESSIVE
from comparison.config import ComparisonConfig
from comparison.deployment import Describe, Endpoint, baseline_of, deploy, incomparable
from comparison.environment import these_versions, this_machine
from comparison.identity import MarginTrace
from comparison.progress import Progress
from comparison.records import Record, failure_of
from comparison.report import Comparison, write_files
from comparison.run import Contender, Generator, RequestSettings, measure_all, trace_margins, warm_up
from comparison.servers import Fleet, Server, ServerFailed
from comparison.summary import References, Summary, summarize
from comparison.table import print_comparison
from speculation.types import ModelInfo


class Client(Generator, Protocol):
    """What is compared, and can say what it runs."""

    async def model_info(self) -> ModelInfo: ...


Connect = Callable[[str, str], AbstractAsyncContextManager[Client]]
"""(address, service) -> a client; the only thing here that knows how servers are reached."""

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
TABLE_WIDTH = 130
"""Where there is no terminal to ask."""


class Unreachable(RuntimeError):
    """An address does not answer as the service that it should be."""


def run_comparison(config: ComparisonConfig, connect: Connect) -> int:
    """The exit code: 0, 1 where a request failed, 2 where a server refused its arguments, 130 when interrupted."""
    try:
        return asyncio.run(_interruptible(config, connect))
    except (asyncio.CancelledError, KeyboardInterrupt):
        print("interrupted: the servers are stopped, nothing was written", file=sys.stderr)
        return INTERRUPTED
    except ServerFailed as error:
        print(f"compare_architectures.py: error: {error}", file=sys.stderr)
        return USAGE if error.returncode == USAGE else FAILED
    except Unreachable as error:
        print(f"compare_architectures.py: error: {error}", file=sys.stderr)
        return FAILED


async def _interruptible(config: ComparisonConfig, connect: Connect) -> int:
    task = asyncio.ensure_future(compare(config, connect))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup asked for just that
            loop.add_signal_handler(number, task.cancel)
    comparison = await task
    return FAILED if comparison.failed else OK


async def compare(config: ComparisonConfig, connect: Connect) -> Comparison:
    started_at = datetime.now(timezone.utc).isoformat(timespec="seconds")
    config.output_dir.mkdir(parents=True, exist_ok=True)
    async with contextlib.AsyncExitStack() as stack:
        progress = stack.enter_context(Progress())
        fleet = await stack.enter_async_context(
            Fleet(config.output_dir / "logs", config.startup_timeout_s, on_wait=progress.waiting)
        )
        endpoints = await deploy(config, _Announcing(fleet, progress), _describing(connect))
        contenders = [await _connected(stack, connect, endpoint) for endpoint in endpoints]
        comparison = await _measured(config, endpoints, contenders, progress, started_at)
        deaths = fleet.deaths()
    files = write_files(comparison)
    print_comparison(comparison, _table_console())
    for death in deaths:
        print(death, file=sys.stderr)
    print("wrote " + ", ".join(str(path) for path in files))
    return comparison


async def _measured(
    config: ComparisonConfig,
    endpoints: Sequence[Endpoint],
    contenders: Sequence[Contender],
    progress: Progress,
    started_at: str,
) -> Comparison:
    settings = RequestSettings(
        config.max_new_tokens, config.speculation_length, config.sampling, config.timeout_s, config.rule
    )
    progress.say("warming up")
    failures = await warm_up(contenders, config.prompts[0], settings)
    progress.expect(len(contenders) * len(config.prompts) * config.num_runs)
    records = await measure_all(
        contenders, config.prompts, config.num_runs, settings, progress.measuring, progress.measured
    )
    return Comparison(
        config,
        tuple(endpoints),
        tuple(records),
        tuple(await _summaries(config, endpoints, contenders, records, settings)),
        this_machine(),
        these_versions(),
        started_at,
        remarks=tuple(incomparable(list(endpoints))),
        warm_up_failures=tuple(failures.items()),
    )


async def _summaries(
    config: ComparisonConfig,
    endpoints: Sequence[Endpoint],
    contenders: Sequence[Contender],
    records: Sequence[Record],
    settings: RequestSettings,
) -> list[Summary]:
    """Where outputs parted, the autoregressive server is asked again how close its choice was."""
    baseline = baseline_of(list(endpoints))
    plain = [contender for contender in contenders if contender.name == AUTOREGRESSIVE.name]
    references = References(baseline.architecture.name if baseline else None, AUTOREGRESSIVE.name if plain else None)
    summaries = summarize(records, references)
    parted = {d.prompt for s in summaries if s.identical for d in s.identical.divergences}
    if not parted:
        return summaries
    traces: dict[str, MarginTrace] = await trace_margins(
        plain[0], [prompt for prompt in config.prompts if prompt.name in parted], settings
    )
    return summarize(records, references, traces)


def _describing(connect: Connect) -> Describe:
    async def describe(address: str, service: str) -> ModelInfo:
        try:
            async with connect(address, service) as client:
                return await client.model_info()
        except Exception as error:
            failure = failure_of(error)
            raise Unreachable(f"{service} at {address} does not answer: {failure.code}: {failure.message}") from error

    return describe


async def _connected(stack: contextlib.AsyncExitStack, connect: Connect, endpoint: Endpoint) -> Contender:
    client = await stack.enter_async_context(connect(endpoint.address, endpoint.architecture.service))
    return Contender(endpoint.architecture.name, client, endpoint.architecture.split)


@dataclass(frozen=True)
class _Announcing:
    """A fleet whose servers are announced as they become ready."""

    fleet: Fleet
    progress: Progress

    async def start(self, name: str, command: list[str]) -> Server:
        server = await self.fleet.start(name, command)
        self.progress.ready(name, server.address, server.startup_seconds)
        return server


def _table_console() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=TABLE_WIDTH)
