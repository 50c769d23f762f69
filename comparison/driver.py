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
from functools import partial
from typing import Protocol

from rich.console import Console

from comparison.architectures import AUTOREGRESSIVE
from comparison.calibration import Calibrator
from comparison.conditions import Condition, LinkChoice
from comparison.config import ComparisonConfig
from comparison.deployment import Describe, Endpoint, baseline_of, deploy, incomparable
from comparison.environment import these_versions, this_machine
from comparison.findings import theory_of
from comparison.history import append_run
from comparison.identity import MarginTrace
from comparison.link_overhead import LinkOverhead
from comparison.progress import Progress
from comparison.records import Record, failure_of
from comparison.regression import judge
from comparison.report import Comparison, ConditionResult, comparison_as_json, write_files
from comparison.run import Contender, Generator, RequestSettings, Stage, measure_all, trace_margins, warm_up
from comparison.servers import Fleet, Server, ServerFailed
from comparison.site import LinkUnavailable, Site, open_site
from comparison.summary import References, Summary, summarize
from comparison.table import print_comparison
from reporting.write import write_report
from speculation.types import ModelInfo, Rule


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
    """The exit code: 0, 1 where a request failed, 2 where a server refused its arguments, 3 for regressions, 130."""
    try:
        return asyncio.run(_interruptible(config, connect))
    except (asyncio.CancelledError, KeyboardInterrupt):
        print("interrupted: the servers are stopped, nothing was written", file=sys.stderr)
        return INTERRUPTED
    except ServerFailed as error:
        print(f"compare_architectures.py: error: {error}", file=sys.stderr)
        return USAGE if error.returncode == USAGE else FAILED
    except LinkUnavailable as error:
        print(f"compare_architectures.py: error: {error}", file=sys.stderr)
        return USAGE
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
    return FAILED if comparison.failed else _judged(comparison)


def _judged(comparison: Comparison) -> int:
    """Beside the baseline, where one was given."""
    if comparison.config.baseline is None:
        return OK
    return judge(comparison.config.baseline, comparison_as_json(comparison))


async def compare(config: ComparisonConfig, connect: Connect) -> Comparison:
    started_at = datetime.now(timezone.utc).isoformat(timespec="seconds")
    config.output_dir.mkdir(parents=True, exist_ok=True)
    async with contextlib.AsyncExitStack() as stack:
        progress = stack.enter_context(Progress())
        site = await stack.enter_async_context(open_site(config))
        fleet = await stack.enter_async_context(
            Fleet(config.output_dir / "logs", config.startup_timeout_s, on_wait=progress.waiting)
        )
        endpoints = await deploy(config, _Announcing(fleet, progress), _describing(connect), site)
        contenders = [await _connected(stack, connect, endpoint) for endpoint in endpoints]
        comparison = await _Measuring(config, endpoints, contenders, site, progress, started_at).run()
        deaths = fleet.deaths()
    progress.say("writing the report")
    files = [*write_files(comparison), *write_report(comparison_as_json(comparison), config.output_dir, config.formats)]
    print_comparison(comparison, _table_console())
    for death in deaths:
        print(death, file=sys.stderr)
    print("wrote " + ", ".join(str(path) for path in files if path.suffix != ".png"))
    print(f"plots as PNG are in {config.output_dir / 'plots'}; the run is a line in {append_run(comparison)}")
    return comparison


@dataclass(frozen=True)
class _Measuring:
    """Everything between servers that are ready and files that are written."""

    config: ComparisonConfig
    endpoints: Sequence[Endpoint]
    contenders: Sequence[Contender]
    site: Site
    progress: Progress
    started_at: str

    async def run(self) -> Comparison:
        config, stages = self.config, [self._stage(condition) for condition in self.config.conditions]
        self.progress.say("warming up")
        await stages[0].enter()
        failures = await warm_up(self.contenders, config.prompts[0], stages[0].settings)
        links = await self._links()
        calibrator = Calibrator(
            self.contenders, stages[0].settings, self._lengths(), len(config.prompts) * config.num_runs
        )
        self.progress.expect(len(stages) * len(self.contenders) * len(config.prompts) * config.num_runs)
        records = await measure_all(
            self.contenders,
            config.prompts,
            config.num_runs,
            stages,
            self.progress.measuring,
            self.progress.measured,
            calibrator.after_prompt,
        )
        results = [
            ConditionResult(
                condition, tuple(await self._summaries(condition, stage, records)), links.get(condition.link)
            )
            for condition, stage in zip(config.conditions, stages, strict=True)
        ]
        return Comparison(
            config,
            tuple(self.endpoints),
            tuple(records),
            tuple(results),
            this_machine(),
            these_versions(),
            self.started_at,
            remarks=tuple([*incomparable(list(self.endpoints)), *self._not_adaptive()]),
            warm_up_failures=tuple(failures.items()),
            theory=None
            if config.speculation_length is None
            else theory_of(
                config.conditions,
                {result.condition.name: result.summaries for result in results},
                records,
                calibrator.found,
                config.speculation_length,
            ),
        )

    def _stage(self, condition: Condition) -> Stage:
        config = self.config
        settings = RequestSettings(
            config.max_new_tokens, config.speculation_length, condition.sampling, config.timeout_s, condition.rule
        )
        return Stage(condition.name, settings, partial(self.site.set, condition.link))

    def _not_adaptive(self) -> list[str]:
        """Who takes a length of its own where auto was asked for."""
        fixed = [e for e in self.endpoints if e.model.draft_name and not e.model.adaptive_speculation_length]
        if self.config.speculation_length is not None or not fixed:
            return []
        each = ", ".join(f"{e.architecture.name} {e.model.default_speculation_length}" for e in fixed)
        return [f"speculation-length auto: these servers were started with a fixed one: {each}"]

    def _lengths(self) -> tuple[int, ...]:
        """Speculation lengths to cost: all that every speculating server takes, and none where nothing speculates."""
        most = [e.model.max_speculation_length for e in self.endpoints if e.model.draft_name]
        return tuple(range(1, min(most) + 1)) if most and self.config.speculation_length else ()

    async def _links(self) -> dict[LinkChoice, LinkOverhead]:
        """What each link adds to what it is set to; the base's is left set."""
        measured: dict[LinkChoice, LinkOverhead] = {}
        for link in reversed(dict.fromkeys(condition.link for condition in self.config.conditions)):
            if link.settings is not None:
                self.progress.say(f"measuring the link: {link}")
                await self.site.set(link)
                measured[link] = await self.site.overhead()
        return measured

    async def _summaries(self, condition: Condition, stage: Stage, records: Sequence[Record]) -> list[Summary]:
        """Where outputs parted, the autoregressive server is asked again how close its choice was."""
        own = [record for record in records if record.condition == condition.name]
        baseline = baseline_of(list(self.endpoints))
        plain = [contender for contender in self.contenders if contender.name == AUTOREGRESSIVE.name]
        exact = plain and condition.rule is Rule.AGREEMENT  # the rejection rule keeps the law, not the tokens
        references = References(
            baseline.architecture.name if baseline else None, AUTOREGRESSIVE.name if exact else None
        )
        summaries = summarize(own, references)
        parted = {d.prompt for s in summaries if s.identical for d in s.identical.divergences}
        if not parted:
            return summaries
        await stage.enter()
        traces: dict[str, MarginTrace] = await trace_margins(
            plain[0], [prompt for prompt in self.config.prompts if prompt.name in parted], stage.settings
        )
        return summarize(own, references, traces)


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
    client = await stack.enter_async_context(connect(endpoint.reached, endpoint.architecture.service))
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
