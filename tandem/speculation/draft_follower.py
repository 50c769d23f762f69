"""Drafts for a remote target that never waits, anew whenever its tokens arrive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tandem.speculation.ahead import DraftingAhead
from tandem.speculation.drafters import Drafter
from tandem.speculation.estimate import Estimate
from tandem.speculation.lookahead import DraftPlan
from tandem.speculation.run_on import RunMessage
from tandem.speculation.types import Proposer, SpeculationStats

_AT_ONCE = 2  # run window that acknowledges every arrival
_MOST_UNANSWERED = 32  # arrivals after which an empty draft shows that the drafter lives


@dataclass(slots=True)
class GivenPlan:
    """The plan that the target's side chose."""

    plan: DraftPlan
    estimate: Estimate = field(default_factory=Estimate)

    def observe(self, hit: bool) -> None:
        """Does nothing: the target's side records acceptance."""


@dataclass(frozen=True, slots=True)
class Followed:
    """A draft after `base` tokens, with its costs since the one before."""

    base: int
    token_ids: tuple[int, ...]
    proposed_by: tuple[Proposer, ...]
    arrivals: int
    drafted: int
    queue_seconds: float
    compute_seconds: float


class Follower:
    """Drafts after `tokens`, up to `end`, in calls of at most `chunk` tokens; calls `news` when `take` has a draft."""

    def __init__(
        self, drafter: Drafter, tokens: Sequence[int], plan: DraftPlan, end: int, chunk: int, news: Callable[[], None]
    ) -> None:
        self._drafter, self._news = drafter, news
        self._lookahead, self._stats = GivenPlan(plan), SpeculationStats()
        self._ahead = DraftingAhead(
            drafter, self._lookahead, self._drew, self._stats, list(tokens), end, chunk, _AT_ONCE, measures=False
        )
        self._arrivals = 1
        self._answered = 0
        self._found: tuple[RunMessage, tuple[Proposer, ...], int] | None = None
        self._told = (0, 0.0, 0.0)  # tokens and seconds of drafting in the drafts taken

    def arrived(self, token_ids: Sequence[int], plan: DraftPlan) -> None:
        self._lookahead.plan = plan
        self._arrivals += 1
        self._ahead.arrived(token_ids)
        self._ahead.was_used(token_ids)
        if self._arrivals - self._answered > _MOST_UNANSWERED:
            known = self._ahead.known
            self._drew(RunMessage(len(known), known[-1], (), 0, 0))

    async def run(self) -> None:
        self._ahead.begin()
        await self._ahead.run()

    def take(self) -> Followed | None:
        """Returns the newest draft, once."""
        found, self._found = self._found, None
        if found is None:
            return None
        message, proposed_by, arrivals = found
        spent = (self._ahead.drafted, self._stats.queue_seconds, self._stats.draft_seconds)
        drafted, queued, computed = (now - before for now, before in zip(spent, self._told, strict=True))
        self._told = spent
        return Followed(message.base_length, message.token_ids, proposed_by, arrivals, int(drafted), queued, computed)

    def _drew(self, message: RunMessage) -> None:
        proposed_by = self._ahead.proposers(len(message.token_ids))
        self._found, self._answered = (message, proposed_by, self._arrivals), self._arrivals
        self._news()
