"""Measures running servers: warm-up, links, requests, component times, margins, loads."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tandem.comparison.links.link import DelayLink
from tandem.comparison.measuring.architectures import AUTOREGRESSIVE, NOT_COSTED, PLAIN, Condition, Load
from tandem.comparison.measuring.attempt import format_error
from tandem.comparison.measuring.config import ComparisonConfig
from tandem.comparison.measuring.deployment import Endpoint
from tandem.comparison.measuring.identity import diverged_prompts
from tandem.comparison.measuring.load_runs import load_turns, measure_loads
from tandem.comparison.measuring.progress import Progress
from tandem.comparison.measuring.record_log import RecordLog
from tandem.comparison.measuring.records import Record
from tandem.comparison.measuring.servers import Fleet
from tandem.comparison.measuring.timed_request import Contender, attempt, measure, rotated, short
from tandem.comparison.measuring.workloads import Prompt
from tandem.speculation.types import Rule

if TYPE_CHECKING:
    from tandem.clients.local import Tokenizer

NOTICED_SECONDS = 1.0  # wait after failed requests for a server's exit
CALIBRATION_TOKENS = 24  # about twenty steps, enough for a mean
CALIBRATIONS = 2  # least requests for each length and architecture


class Unmeasurable(RuntimeError):
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
        config, base = self.config, self.config.conditions[0]
        await self._warm_up(base)
        await self._links()
        self.progress.expect(self.log.measured.planned)
        await self._requests()
        for condition in config.conditions:
            try:
                await self._margins(condition)
            except Exception as error:  # margins are only extra detail
                self.log.add(
                    "remark",
                    f"Margins of outputs that parted were not traced under {condition.name}: {format_error(error)}",
                )
        if config.loads:
            await self._enter(base)
            turns = load_turns(config, max(load.requests for load in config.loads), self.tokenizer)
            conditions, seed = config.load_conditions, config.sampling.seed
            bound_s = None if config.capacity is None else config.capacity / 1000
            await measure_loads(self.contenders, turns, conditions, seed, self._load, self._measured, bound_s)

    def _load(self, architecture: str, load: Load) -> None:
        self.progress.say(f"{architecture}, {load}: {load.requests} requests")

    def _measured(self, record: Record) -> None:
        self.log.add("record", record)
        self.progress.measured(record)

    async def _enter(self, condition: Condition, share: float = 0.0) -> None:
        """Sets the condition's link; a recorded one begins at `share` of its length."""
        link, recorded = condition.link, condition.link.recorded
        if recorded:
            link = replace(link, trace_from=share)
        if self.link and (recorded or link != self.link.settings):
            await self.link.set(link)

    async def _warm_up(self, base: Condition) -> None:
        """Sends one short request to each contender and records the failures."""
        self.progress.say("warming up")
        await self._enter(base)
        prompt = self.config.prompts[0]
        for contender in self.contenders:
            record = Record(contender.name, prompt.name, prompt.kind, 0, condition="warm-up")
            failure = (await attempt(contender, record, short(prompt.into(base.request)))).error
            if failure and failure.message.startswith("chat: "):
                raise Unmeasurable(
                    f"raw: give your prompts as they are, with --raw: {contender.name}: {failure.message}"
                )
            if failure:
                self.log.add("warm-up failure", contender.name, failure)

    async def _links(self) -> None:
        """Measures every link's overhead, the base's last so that it stays set."""
        for link, condition in reversed({condition.link: condition for condition in self.config.conditions}.items()):
            if self.link:
                self.progress.say(f"measuring the link: {link}")
                await self._enter(condition)
                self.log.add("link", link, await self.link.overhead())

    async def _requests(self) -> None:
        """Measures all requests without load.

        Contenders take turns and the first rotates, so that a machine's drift favors none. A recorded link begins at
        the share of turns that have passed.
        """
        config = self.config
        turns = list(itertools.product(range(config.num_runs), config.prompts))
        lengths = self._lengths()
        due, each_time = itertools.cycle(lengths or (0,)), math.ceil(CALIBRATIONS * len(lengths) / len(turns))
        for turn, (run, prompt) in enumerate(turns):
            for condition in config.conditions:
                for contender in rotated(self.contenders, turn):
                    self.progress.say(f"{contender.name} · {prompt.name}")
                    await self._enter(condition, turn / len(turns))
                    record = Record(contender.name, prompt.name, prompt.kind, run, condition=condition.name)
                    self._measured(await attempt(contender, record, prompt.into(condition.request, run)))
            if config.calibrates:
                await self._enter(config.conditions[0], turn / len(turns))
                await self._calibrate(prompt, itertools.islice(due, each_time))

    def _lengths(self) -> tuple[int, ...]:
        """Returns the lengths that every speculating server supports; for auto also 0."""
        most = [e.model.max_speculation_length for e in self.endpoints if e.model.draft_name]
        shortest = 0 if self.config.speculation_length is None else 1
        return tuple(range(shortest, min(most) + 1)) if most and self.config.speculation_length != 0 else ()

    async def _calibrate(self, prompt: Prompt, lengths: Iterator[int]) -> None:
        """Sends short requests, apart from the measured ones: plain ones, and drafting ones of the lengths."""
        base = self.config.conditions[0].request
        request = replace(base, max_new_tokens=min(CALIBRATION_TOKENS, base.max_new_tokens or CALIBRATION_TOKENS))
        plain = [c for c in self.contenders if c.name in PLAIN]
        drafting = [c for c in self.contenders if c.name not in NOT_COSTED]
        for contender, length in (*((c, 0) for c in plain), *((c, length) for length in lengths for c in drafting)):
            with contextlib.suppress(Exception):  # the measured requests to the same server report what is wrong
                found = await measure(contender, prompt.into(replace(request, speculation_length=length)))
                self.log.add("calibration", contender.name, length, found)

    async def _margins(self, condition: Condition) -> None:
        """Repeats diverged prompts on the autoregressive server for their logit margins."""
        plain = next((contender for contender in self.contenders if contender.name == AUTOREGRESSIVE.name), None)
        if not plain or condition.request.rule is Rule.REJECTION:  # which keeps the distribution, not the tokens
            return
        own = [record for record in self.log.measured.records if record.condition == condition.name]
        names = diverged_prompts(own, [record for record in own if record.architecture == AUTOREGRESSIVE.name])
        if names:
            await self._enter(condition)
        for prompt in self.config.prompts:
            if prompt.name in names:
                with contextlib.suppress(Exception):  # the measured requests report what is wrong
                    found = await measure(plain, replace(prompt.into(condition.request), margins=True))
                    self.log.add("margins", condition.name, prompt.name, found)
