"""Measures running servers: warm-up, links, requests, margins, loads."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tandem.comparison.links.link import DelayLink
from tandem.comparison.measuring.architectures import AUTOREGRESSIVE
from tandem.comparison.measuring.attempt import format_error
from tandem.comparison.measuring.calibration import Calibrator
from tandem.comparison.measuring.conditions import Condition
from tandem.comparison.measuring.config import ComparisonConfig
from tandem.comparison.measuring.deployment import Endpoint
from tandem.comparison.measuring.identity import diverged_prompts
from tandem.comparison.measuring.loading import measure_loads
from tandem.comparison.measuring.loads import Load
from tandem.comparison.measuring.own_texts import own_texts
from tandem.comparison.measuring.progress import Progress
from tandem.comparison.measuring.record_log import RecordLog
from tandem.comparison.measuring.records import Record
from tandem.comparison.measuring.run import Contender, measure_all, trace_margins, warm_up
from tandem.comparison.measuring.servers import Fleet
from tandem.comparison.measuring.traffic import most_requests, requests_of
from tandem.speculation.types import Rule

if TYPE_CHECKING:
    from tandem.clients.encoding import Tokenizer

NOTICED_SECONDS = 1.0  # wait after failed requests for a server's exit


class Refused(RuntimeError):
    """These servers cannot be measured with these settings; one line that names the flag."""


class ServerDied(RuntimeError):
    """A needed server exited; names it, its exit code and its log."""


async def while_all_live(work: Coroutine[Any, Any, None], fleet: Fleet, log: RecordLog) -> None:
    """Runs `work`; cancels it and raises ServerDied if a server exits."""
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
    """Measures every condition and logs each result at once."""

    config: ComparisonConfig
    endpoints: Sequence[Endpoint]
    contenders: Sequence[Contender]
    link: DelayLink | None
    progress: Progress
    log: RecordLog
    tokenizer: Tokenizer | None = None  # cuts prompts to a load's lengths

    async def run(self) -> None:
        config, conditions = self.config, self.config.conditions
        base = conditions[0]
        self.progress.say("warming up")
        await self._enter(base)
        for name, failure in (await warm_up(self.contenders, config.prompts[0], base.request)).items():
            if failure.message.startswith("chat: "):
                raise Refused(f"raw: give your prompts as they are, with --raw: {name}: {failure.message}")
            self.log.add("warm-up failure", name, failure)
        await self._links()
        calibrator = Calibrator(
            self.contenders,
            base.request,
            self._lengths(),
            len(config.prompts) * config.num_runs,
            lambda found: self.log.add("calibration", found),
        )
        self.progress.expect(self.log.measured.planned)
        await measure_all(
            self.contenders,
            config.prompts,
            config.num_runs,
            conditions,
            self._enter,
            self.progress.measuring,
            self._measured,
            calibrator.after_prompt if config.predicts else None,
        )
        for condition in conditions:
            try:
                await self._margins(condition)
            except Exception as error:  # margins are only extra detail
                self.log.add(
                    "remark",
                    f"Margins of outputs that parted were not traced under {condition.name}: {format_error(error)}",
                )
        if config.over_http and (remark := await own_texts(self.contenders, config, self.log.measured.records)):
            self.log.add("remark", remark)
        if config.loads:
            await self._enter(base)
            asked = requests_of(config, most_requests(config), self.tokenizer)
            loaded, seed = config.load_conditions, config.sampling.seed
            bound_s = None if config.capacity_ms is None else config.capacity_ms / 1000
            await measure_loads(self.contenders, asked, loaded, seed, self._under_load, self._measured, bound_s)

    def _under_load(self, architecture: str, load: Load) -> None:
        self.progress.say(f"{architecture}, {load}: {load.requests} requests")

    def _measured(self, record: Record) -> None:
        self.log.add("record", record)
        self.progress.measured(record)

    async def _enter(self, condition: Condition, share: float = 0.0) -> None:
        """Sets the condition's link; a recorded one begins at `share` of its length."""
        link, recorded = condition.link, condition.link.but.recorded
        if recorded:
            link = replace(link, but=replace(link.but, trace_from=share))
        if self.link and (recorded or link != self.link.settings):
            await self.link.set(link)

    def _lengths(self) -> tuple[int, ...]:
        """Returns the lengths that every speculating server supports; for auto also 0."""
        most = [e.model.max_speculation_length for e in self.endpoints if e.model.draft_name]
        shortest = 0 if self.config.speculation_length is None else 1
        return tuple(range(shortest, min(most) + 1)) if most and self.config.speculation_length != 0 else ()

    async def _links(self) -> None:
        """Measures every link's overhead, the base's last so that it stays set."""
        for link, condition in reversed({condition.link: condition for condition in self.config.conditions}.items()):
            if self.link:
                self.progress.say(f"measuring the link: {link}")
                await self._enter(condition)
                self.log.add("link", link, await self.link.overhead())

    async def _margins(self, condition: Condition) -> None:
        """Repeats diverged prompts on the autoregressive server for their logit margins."""
        plain = [contender for contender in self.contenders if contender.name == AUTOREGRESSIVE.name]
        if not plain or condition.request.rule is Rule.REJECTION:  # which keeps the distribution, not the tokens
            return
        own = [record for record in self.log.measured.records if record.condition == condition.name]
        names = diverged_prompts(own, [record for record in own if record.architecture == AUTOREGRESSIVE.name])
        if not names:
            return
        await self._enter(condition)
        prompts = [prompt for prompt in self.config.prompts if prompt.name in names]
        for name, trace in (await trace_margins(plain[0], prompts, condition.request)).items():
            self.log.add("margins", condition.name, name, trace)
