"""Measures against running servers: warm-up, links, requests, margins, loads."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from tandem.comparison.analysis.identity import diverged_prompts
from tandem.comparison.links.link import Link
from tandem.comparison.links.settings import LinkSettings
from tandem.comparison.measuring.architectures import AUTOREGRESSIVE
from tandem.comparison.measuring.calibration import NOT_COSTED, Calibrator
from tandem.comparison.measuring.conditions import Condition
from tandem.comparison.measuring.config import ComparisonConfig
from tandem.comparison.measuring.deployment import Endpoint
from tandem.comparison.measuring.loading import Loader
from tandem.comparison.measuring.loads import Load
from tandem.comparison.measuring.progress import Progress
from tandem.comparison.measuring.record_log import RecordLog
from tandem.comparison.measuring.records import Record
from tandem.comparison.measuring.run import Contender, RequestSettings, Stage, measure_all, trace_margins, warm_up
from tandem.comparison.measuring.servers import Fleet
from tandem.comparison.measuring.traffic import requests_of
from tandem.comparison.report.attempt import format_error
from tandem.speculation.types import Rule

if TYPE_CHECKING:
    from tandem.clients.encoding import Tokenizer

NOTICED_SECONDS = 1.0
"""How long to wait, after failed requests, for a server's exit to be noticed."""


class ServerDied(RuntimeError):
    """A server exited while it was needed; the message names it, its exit code and its log."""


async def while_all_live(work: Coroutine[Any, Any, None], fleet: Fleet, log: RecordLog) -> None:
    """Runs `work` and cancels it if a server exits. Raises ServerDied."""
    measuring, death = asyncio.ensure_future(work), asyncio.ensure_future(fleet.death())
    try:
        await asyncio.wait({measuring, death}, return_when=asyncio.FIRST_COMPLETED)
        if measuring.done() and any(record.error for record in log.measured.records):
            await asyncio.wait({death}, timeout=NOTICED_SECONDS)  # a connection breaks before the process is reaped
        if death.done():
            raise ServerDied(death.result())
        measuring.result()
    finally:
        for task in (measuring, death):
            task.cancel()
        await asyncio.gather(measuring, death, return_exceptions=True)


@dataclass(frozen=True)
class Measuring:
    """Measures every condition and logs each result at once. `tokenizer` cuts a load's prompts, if it has a length."""

    config: ComparisonConfig
    endpoints: Sequence[Endpoint]
    contenders: Sequence[Contender]
    link: Link
    progress: Progress
    log: RecordLog
    tokenizer: Tokenizer | None = None

    async def run(self) -> None:
        config, stages = self.config, [self._stage(condition) for condition in self.config.conditions]
        self.progress.say("warming up")
        await stages[0].enter()
        for name, failure in (await warm_up(self.contenders, config.prompts[0], stages[0].settings)).items():
            self.log.warm_up_failed(name, failure)
        await self._links()
        calibrator = Calibrator(
            self.contenders,
            stages[0].settings,
            self._lengths(),
            len(config.prompts) * config.num_runs,
            self.log.calibration,
            self._predicts(),
        )
        self.progress.expect(self.log.measured.planned)
        await measure_all(
            self.contenders,
            config.prompts,
            config.num_runs,
            stages,
            self.progress.measuring,
            self._measured,
            calibrator.after_prompt,
        )
        for condition, stage in zip(config.conditions, stages, strict=True):
            try:
                await self._margins(condition, stage)
            except Exception as error:  # margins are only extra detail
                self.log.remark(
                    f"Margins of outputs that parted were not traced under {condition.name}: {format_error(error)}"
                )
        if config.loads:
            await stages[0].enter()
            await self._loads(stages[0].settings)

    async def _loads(self, settings: RequestSettings) -> None:
        config = self.config
        asked = requests_of(config, config.loads[0].requests, settings, self.tokenizer)
        loader = Loader(
            self.contenders, asked, config.sampling.seed, config.timeout_s, self._under_load, self._measured
        )
        await loader.measure(config.load_conditions)

    def _under_load(self, architecture: str, load: Load) -> None:
        self.progress.say(f"{architecture}, {load}: {load.requests} requests")

    def _measured(self, record: Record) -> None:
        self.log.record(record)
        self.progress.measured(record)

    def _stage(self, condition: Condition) -> Stage:
        config = self.config
        settings = RequestSettings(
            config.max_new_tokens,
            config.speculation_length,
            condition.sampling,
            config.timeout_s,
            condition.rule,
            config.adapter,
        )
        return Stage(condition.name, settings, partial(self._set, condition.link))

    async def _set(self, settings: LinkSettings) -> None:
        if settings.rtt_ms is not None and settings != self.link.settings:
            await self.link.set(settings)

    def _lengths(self) -> tuple[int, ...]:
        """Returns the speculation lengths to calibrate: those that every speculating server supports."""
        most = [e.model.max_speculation_length for e in self.endpoints if e.model.draft_name]
        return tuple(range(1, min(most) + 1)) if most and self.config.speculation_length else ()

    def _predicts(self) -> bool | None:
        """Whether plain and speculating servers are both measured, where that is in turn; else None."""
        if self.config.placement is None:
            return None
        asked = set(self.config.architectures)
        return bool(self.config.speculation_length and AUTOREGRESSIVE.name in asked and asked - {*NOT_COSTED})

    async def _links(self) -> None:
        """Measures the overhead of every link, the base's last so that it stays set."""
        for link in reversed(dict.fromkeys(condition.link for condition in self.config.conditions)):
            if link.rtt_ms is not None:
                self.progress.say(f"measuring the link: {link}")
                await self._set(link)
                self.log.link(link, await self.link.overhead())

    async def _margins(self, condition: Condition, stage: Stage) -> None:
        """Repeats prompts with differing outputs on the autoregressive server to get the logit margins."""
        plain = [contender for contender in self.contenders if contender.name == AUTOREGRESSIVE.name]
        if not plain or condition.rule is not Rule.AGREEMENT:  # rejection keeps the distribution, not the tokens
            return
        own = [record for record in self.log.measured.records if record.condition == condition.name]
        names = diverged_prompts(own, [record for record in own if record.architecture == AUTOREGRESSIVE.name])
        if not names:
            return
        await stage.enter()
        prompts = [prompt for prompt in self.config.prompts if prompt.name in names]
        for name, trace in (await trace_margins(plain[0], prompts, stage.settings)).items():
            self.log.margins(condition.name, name, trace)
