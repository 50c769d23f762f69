"""A row's session at a worker, in either form. All of this runs on the event loop, and nothing raises."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from tandem.rpc.propose_stream import StreamedDrafts
from tandem.rpc.remote_drafter import RemoteDrafter
from tandem.speculation.ahead import DraftingAhead
from tandem.speculation.drafters import NgramDrafter
from tandem.speculation.fallible import FallibleDrafter
from tandem.speculation.lookahead import LookaheadPolicy
from tandem.speculation.run_on import RunMessage
from tandem.speculation.types import Draft, Request, SpeculationStats, Verdict
from tandem.vllm.rows import Held, Row
from tandem.vllm.workers import Seen, Worker

ASKED = Request()
"""Workers draft greedily, whatever the engine samples: its rejection sampler takes drafts as certain, so the likeliest
token is the best one to propose."""


class Session(Protocol):
    """What both forms have."""

    worker: Worker
    reach: LookaheadPolicy

    def stepped(self, new: Sequence[int], offered: int, seen: Seen) -> None:
        """Follows a step, which verified `offered` tokens of this session's drafts and made the tokens `new`."""

    async def close(self) -> None:
        """Frees what the worker holds for the row."""


class Asked:
    """One call of Propose at a time."""

    def __init__(self, worker: Worker) -> None:
        self.worker, self.stats = worker, SpeculationStats()
        self.reach = LookaheadPolicy(worker.target.k, worker.estimate)
        drafter = RemoteDrafter(worker, ASKED, worker.target.vocab_size, self.stats, worker.estimate)
        self._drafter = FallibleDrafter(drafter, worker.health, stats=self.stats)
        self.opened = False
        worker.sessions += 1

    def stepped(self, new: Sequence[int], offered: int, seen: Seen) -> None:
        if seen.seconds > 0:
            self.worker.stepped(self.reach, offered, _verdict(new, seen), waited=True)

    async def propose(self, tokens: Sequence[int], k: int) -> Draft:
        draft = await self._drafter.propose(tokens, k)
        self.opened = True
        return draft

    async def close(self) -> None:
        self.worker.sessions -= 1
        await self._drafter.close()


class Streamed:
    """A stream of drafts, which go to `row.held` as they arrive."""

    def __init__(self, worker: Worker, row: Row, known: Sequence[int]) -> None:
        self.worker, self._row = worker, row
        self.reach = LookaheadPolicy(worker.target.k, worker.estimate)
        stats = SpeculationStats()
        self.ahead = DraftingAhead(
            NgramDrafter(),  # never asked: drafts are made elsewhere
            self.reach,
            self._hold,
            stats,
            list(known),
            worker.target.max_length,
            chunk=1,
            measures=False,
            drafts_here=False,
        )
        streamed = StreamedDrafts(worker, ASKED, worker.target.vocab_size, stats)
        self._tasks = [
            asyncio.create_task(self.ahead.run(), name="hold drafts"),
            asyncio.create_task(streamed.run(self.ahead, len(known)), name="stream drafts"),
        ]
        worker.sessions += 1

    def _hold(self, message: RunMessage) -> None:
        self._row.held = Held(message.base_length, message.token_ids, message.most_drafts)

    def stepped(self, new: Sequence[int], offered: int, seen: Seen) -> None:
        if seen.seconds > 0:
            self.worker.stepped(self.reach, offered, _verdict(new, seen), waited=False)
        self.ahead.arrived(new)
        self.ahead.was_used(new)

    async def close(self) -> None:
        self.worker.sessions -= 1
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _verdict(new: Sequence[int], seen: Seen) -> Verdict:
    return Verdict(
        tuple(new), len(new) - 1, compute_seconds=seen.seconds, rows=seen.rows, step_tokens=max(seen.tokens, len(new))
    )
