"""Drafts for a verifier that never waits: extends the path, or restarts when arriving tokens contradict it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from tandem.speculation.drafters import Drafter
from tandem.speculation.estimate import Estimate
from tandem.speculation.run_on import MAX_UNREAD, RunMessage
from tandem.speculation.types import Draft, LengthPlan, Proposer, SpeculationStats
from tandem.speculation.verification_mode import DraftPlan, LookaheadPolicy


@dataclass(slots=True)
class DraftingAhead:
    """Drafts for one run and sends its messages."""

    drafter: Drafter
    lookahead: LookaheadPolicy
    send: Callable[[RunMessage], None]
    stats: SpeculationStats
    known: list[int]  # committed tokens; the path begins with them
    end: int  # most tokens of the run
    chunk: int  # most tokens of a drafter's call
    window: int = MAX_UNREAD  # tokens that the verifier may be ahead of `used`
    clock: Callable[[], float] = time.perf_counter
    measures: bool = True  # a call's time is that of drafting; else the drafter measures its own
    drafts_here: bool = True  # else drafts are made elsewhere and adopted
    copies: int = 0  # tokens that a step without a draft may copy from the text
    heard: Callable[[], None] | None = None  # called when tokens arrive
    drafted: int = 0
    used: int = 0  # tokens handed to the caller, prompt included
    _path: list[int] = field(default_factory=list)
    _proposers: dict[int, Proposer] = field(default_factory=dict)
    _sent_length: int = 0  # the length of the path that was sent
    _sent_width: int = 0
    _acknowledged: int = 0
    _until: int = 0
    _starts: int = 0  # how often the path was left
    _observed: int = 0  # the length up to which `lookahead` knows what was drafted for each place
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.used = len(self.known)
        self._leave_path()

    def begin(self) -> None:
        self._send_path(self.lookahead.plan)
        self._news.set()

    def arrived(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            at = len(self.known)
            if at < len(self._path):
                self._observe(at, self._path[at] == token)
            follows = at < len(self._path) and self._path[at] == token
            self.known.append(token)
            if not follows:
                self._leave_path()
        self._news.set()
        if self.heard:
            self.heard()

    def adopt(self, base: int, token_ids: Sequence[int], proposed_by: Sequence[Proposer] = ()) -> None:
        """Takes a draft from elsewhere, made after `base` tokens; drops it if contradicted."""
        for at, token in enumerate(token_ids, base):
            if at == len(self.known):
                break
            hit = self.known[at] == token
            if at >= self._observed:
                self._observe(at, hit)
            if not hit:
                return
        ahead, held = list(token_ids[len(self.known) - base :]), self._path[len(self.known) :]
        if held[: len(ahead)] == ahead:
            return
        if ahead[: len(held)] != held:
            self._sent_length = len(self.known)
        self._path = [*self.known, *ahead]
        self._proposers.update((at, one) for at, one in enumerate(proposed_by, base) if at >= self.used)
        self._news.set()

    def was_used(self, token_ids: Sequence[int]) -> None:
        """Records tokens handed to the caller; acknowledges them before the verifier would stop."""
        for at in range(self.used, self.used + len(token_ids)):
            self._proposers.pop(at, None)
        self.used += len(token_ids)
        if self._allowed - self._until >= self.window // 4 or self._allowed == self.end > self._until:
            self._news.set()

    def proposers(self, count: int) -> tuple[Proposer, ...]:
        """Returns the proposers of the `count` tokens after those used, as far as known."""
        found = (self._proposers.get(at) for at in range(self.used, self.used + count))
        return tuple(proposer or Proposer.MODEL for proposer in found)

    @property
    def copies_next(self) -> bool:
        """Whether the next token was drafted by a copy, which the target could have made."""
        return self.copies > 0 and self._proposers.get(len(self.known)) is Proposer.NGRAM

    async def run(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            while self.drafts_here and await self._draft_more():
                pass
            plan = self.lookahead.plan
            rests = self._sent_width > plan.width == 0  # the verifier then hands out steps together
            if rests or (plan.width and len(self._path) > self._sent_length) or self._must_acknowledge():
                self._send_path(plan)

    async def _draft_more(self) -> bool:
        """Drafts one chunk; returns whether more may follow."""
        plan = self.lookahead.plan
        missing = min(len(self.known) + plan.depth, self.end - 1) - len(self._path)
        if missing < 1 or not plan.width:
            return False
        starts, path, known, began = self._starts, self._path, len(self.known), self.clock()
        draft = await self.drafter.propose(path, LengthPlan(missing, missing).within(self.chunk))
        if self.measures:
            self.lookahead.estimate.drafted(len(draft.token_ids), self.clock() - began)
        self.stats.spent(draft)
        self.drafted += len(draft.token_ids)
        if starts != self._starts:  # overtaken while it was drafted
            by = (*(self._proposers.get(at, Proposer.MODEL) for at in range(known, len(path))), *draft.proposed_by)
            self.adopt(known, [*path[known:], *draft.token_ids], by)
            return True
        for at, proposer in enumerate(draft.proposed_by, len(path)):
            self._proposers[at] = proposer
        self._path += draft.token_ids
        ahead = len(self._path) - len(self.known)
        if ahead >= plan.fresh and len(self._path) - self._sent_length >= plan.width:
            self._send_path(plan)
        return bool(draft.token_ids)

    def _observe(self, at: int, hit: bool) -> None:
        self._observed = at + 1
        # A target that copies by itself needs no drafter for copies
        if not (self.copies and self._proposers.get(at) is Proposer.NGRAM):
            self.lookahead.observe(hit)

    def _leave_path(self) -> None:
        self._path = list(self.known)
        self._sent_length = len(self._path)
        self._starts += 1

    @property
    def _allowed(self) -> int:
        return min(self.end, self.used + self.window)

    def _must_acknowledge(self) -> bool:
        more = self._allowed > self._until
        few = self.window // 2
        return (more and self._until - len(self.known) < few) or len(self.known) - self._acknowledged >= few

    def _send_path(self, plan: DraftPlan) -> None:
        known, self._sent_width = len(self.known), plan.width
        self._sent_length, self._acknowledged, self._until = len(self._path), known, self._allowed
        path = tuple(self._path[known:])
        self.send(RunMessage(known, self.known[-1], path, self._until, plan.width, self.copies))


_AT_ONCE = 2  # run window that acknowledges every arrival
_MOST_UNANSWERED = 32  # arrivals after which an empty draft shows that the drafter lives


class Follower:
    """Drafts after `tokens`, up to `end`, in calls of at most `chunk` tokens; calls `news` when `take` has a draft."""

    def __init__(
        self, drafter: Drafter, tokens: Sequence[int], plan: DraftPlan, end: int, chunk: int, news: Callable[[], None]
    ) -> None:
        self._drafter, self._news = drafter, news
        self._lookahead, self._stats = LookaheadPolicy(0, Estimate(), given=plan), SpeculationStats()
        self._ahead = DraftingAhead(
            drafter, self._lookahead, self._drew, self._stats, list(tokens), end, chunk, _AT_ONCE, measures=False
        )
        self._arrivals = 1
        self.answered = 0  # arrivals before the newest draft
        self._found: tuple[int, Draft] | None = None
        self._taken = (0, 0.0, 0.0)  # tokens and seconds of drafting in the drafts taken

    def arrived(self, token_ids: Sequence[int], plan: DraftPlan) -> None:
        self._lookahead.given = plan
        self._arrivals += 1
        self._ahead.arrived(token_ids)
        self._ahead.was_used(token_ids)
        if self._arrivals - self.answered > _MOST_UNANSWERED:
            known = self._ahead.known
            self._drew(RunMessage(len(known), known[-1], (), 0, 0))

    async def run(self) -> None:
        self._ahead.begin()
        await self._ahead.run()

    def take(self) -> tuple[int, Draft, int] | None:
        """Returns the newest draft, once: base, draft, tokens drafted. Tokens and seconds are since the one before."""
        found, self._found = self._found, None
        if found is None:
            return None
        spent = (self._ahead.drafted, self._stats.queue_seconds, self._stats.draft_seconds)
        drafted, queued, computed = (now - before for now, before in zip(spent, self._taken, strict=True))
        self._taken = spent
        base, draft = found
        return base, replace(draft, queue_seconds=queued, compute_seconds=computed), int(drafted)

    def _drew(self, message: RunMessage) -> None:
        draft = Draft(message.token_ids, proposed_by=self._ahead.proposers(len(message.token_ids)))
        self._found, self.answered = (message.base_length, draft), self._arrivals
        self._news()
