"""Whether a request's rounds wait for a remote target, chosen when its session opens."""

from __future__ import annotations

import enum
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from tandem.speculation.estimate import Estimate
from tandem.speculation.lookahead import LookaheadPolicy
from tandem.speculation.loop import Rounds
from tandem.speculation.types import Draft, Verdict

# Round trip / verification below which depth stays minimal: on shared cores drafting ahead costs more than it saves
# (measured at 1 ms / 11 ms: `auto` took 1.1 to 1.2 times as long per token as stop-and-wait).
SHORT_NETWORK = 0.25


class Pipeline(enum.Enum):
    """Whether rounds overlap, or the target never waits. The values are command-line values."""

    OFF = "off"
    ON = "on"
    NEVER_WAITING = "never-waiting"
    AUTO = "auto"


class Depth:
    """Chooses the depth for one request; all requests to a target share `estimate`."""

    def __init__(self, pipeline: Pipeline, most: int, estimate: Estimate | None = None) -> None:
        if most < 1:
            raise ValueError(f"depth: at least 1 round must be in flight, not {most}")
        self._least = min(most, 2 if pipeline is Pipeline.ON else 1)
        self._most = 1 if pipeline is Pipeline.OFF else most
        self.estimate = estimate or Estimate()

    def of(self, k: int) -> int:
        """Returns how many rounds of `k` draft tokens to keep in flight."""
        known = self.estimate
        if k == 0:
            return 1
        if not known.timed or self._most == 1 or known.rtt < SHORT_NETWORK * known.verification:
            return self._least
        meanwhile = (known.rtt + known.verification) / max(1e-9, (k + 1) * known.draft_token)
        return max(self._least, math.floor(min(self._most, 1 + meanwhile)))


NEAR_SECONDS = 0.005  # a shorter round trip is waited for until the target's times are known


def never_waits(pipeline: Pipeline, most: int, estimate: Estimate, opening_rtt: float = 0.0) -> bool:
    """Returns whether a never-waiting target likely serves best, with drafts of at most `most` tokens."""
    if pipeline is not Pipeline.AUTO:
        return pipeline is Pipeline.NEVER_WAITING
    if most == 0:
        return True  # plain decoding saves every round trip
    if not estimate.timed:
        return opening_rtt >= NEAR_SECONDS
    return estimate.rtt >= SHORT_NETWORK * estimate.verification


@dataclass(slots=True)
class ChosenRounds(Rounds):
    """Rounds of one of two ways at the same session, with the same drafter."""

    opens: Callable[[Sequence[int]], Awaitable[bool]]  # whether the target already runs
    runs: Callable[[], bool]
    waiting: Rounds
    running: Rounds
    lookahead: LookaheadPolicy
    measures_steps: bool = False  # waiting rounds do not
    _chosen: Rounds | None = None

    async def open(self, prompt: Sequence[int]) -> None:
        begun = await self.opens(prompt)
        self._chosen = self.running if begun or self.runs() else self.waiting
        await self._chosen.open(prompt)

    async def round(self, tokens: Sequence[int], k: int, model_k: int | None = None) -> tuple[Draft, Verdict]:
        assert self._chosen is not None, "open comes first"
        draft, verdict = await self._chosen.round(tokens, k, model_k)
        if self._chosen is self.waiting:
            self.lookahead.waited(len(draft.token_ids), verdict)
            if self.measures_steps:
                self.lookahead.estimate.verified(verdict.queue_seconds + verdict.compute_seconds, None)
        return draft, verdict

    async def close(self) -> None:
        first = self._chosen or self.running  # which may have begun before the session was open
        try:
            await first.close()
        finally:
            await (self.waiting if first is self.running else self.running).close()
