"""A row's stream of drafts from a worker, on the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tandem.rpc.propose_stream import StreamedDrafts
from tandem.speculation.ahead import GivenPlan
from tandem.speculation.lookahead import DraftPlan
from tandem.speculation.types import Proposer, Request, SpeculationStats
from tandem.vllm.rows import Held, Row
from tandem.vllm.workers import Worker

if TYPE_CHECKING:
    from tandem.vllm.delivery import Arrivals

GREEDY = Request()  # vLLM takes drafts as certain: propose the likeliest tokens
AHEAD_LENGTHS = 3  # of a step's draft: a late draft's first tokens are known


class RowSession:
    """Follows `row` from its `known` tokens; drafts go to `row.held`, of which steps verify `k` tokens."""

    def __init__(self, worker: Worker, row: Row, known: list[int], k: int, budget_seconds: float) -> None:
        self.worker, self.known, self.end = worker, known, worker.target.max_length
        self.lookahead = GivenPlan(DraftPlan(AHEAD_LENGTHS * k, k, k))
        self.drafted = 0
        self.heard: Callable[[], None] | None = None
        self.awaited: Arrivals | None = None
        self._row, self._budget = row, budget_seconds
        self._step, self._length, self._stepped_at = 0, 0, 0.0  # of the oldest unanswered step but the first
        self._drafts = StreamedDrafts(worker, GREEDY, worker.target.vocab_size, SpeculationStats())
        following = self._drafts.run(self, len(known), self._came)
        self._task = asyncio.create_task(following, name="follow a row")
        worker.sessions += 1

    @property
    def following(self) -> bool:
        return self._drafts.following

    def stepped(self, new: Sequence[int], arrivals: Arrivals, step: int) -> None:
        self.awaited = arrivals
        self.known += new
        if self._step and time.monotonic() - self._stepped_at > self._budget:
            self._answered()
        if not self._step:
            self._step, self._length, self._stepped_at = step, len(self.known), time.monotonic()
        if self.heard:
            self.heard()

    def adopt(self, base: int, token_ids: Sequence[int], proposed_by: Sequence[Proposer] = ()) -> None:
        """Holds a draft that extends the first `base` tokens."""
        self._row.held = Held(base, tuple(token_ids))
        if self._step and base >= self._length:
            self._answered()
        if base == len(self.known):
            self._came()

    async def close(self) -> None:
        self.worker.sessions -= 1
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def _answered(self) -> None:
        self.worker.answered(time.monotonic() - self._stepped_at <= self._budget, self._step)
        self._step = 0

    def _came(self) -> None:
        if self.awaited:
            self.awaited.came(self._row)
