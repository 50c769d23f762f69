"""The generation loop of every architecture: draft, verify, commit. A draft length of 0 is plain decoding."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine, Sequence
from typing import Any, Protocol

from tandem.speculation.length import FixedLength
from tandem.speculation.stopping import Stopping
from tandem.speculation.types import Chunk, Draft, LengthPlan, SpeculationStats, Verdict

# Seconds for which tokens wait for later ones: readers see no gap, and each hand-out costs the steps' cores 1.3 ms.
TOGETHER = 1 / 60


class Rounds(Protocol):
    """Rounds of draft and verification, wherever the models run."""

    lengths: FixedLength | None = None  # chooses draft lengths, if the rounds do

    def plan(self, length: LengthPlan) -> None:
        """Sets the lengths of rounds after the one under way."""
        return

    async def open(self, prompt: Sequence[int]) -> None:
        """Prepares for a request with this prompt."""

    async def round(self, tokens: Sequence[int], plan: LengthPlan) -> tuple[Draft, Verdict]:
        """Drafts as `plan` says, and verifies."""

    async def close(self) -> None:
        """Frees resources; idempotent, at any time."""


async def speculate(
    prompt: Sequence[int], lengths: FixedLength, rounds: Rounds, stopping: Stopping, stats: SpeculationStats
) -> AsyncGenerator[Chunk, None]:
    """Yields what rounds commit, up to the stop; updates `stats`; closes `rounds`."""
    tokens = list(prompt)
    under_way: _Round | None = None
    held, since = Chunk(), -1.0  # the first tokens are not held
    try:
        started = time.perf_counter()
        await rounds.open(tokens)
        stats.prefill_seconds = time.perf_counter() - started
        length = lengths.choose(stopping.remaining)
        rounds.plan(length)
        while stopping.remaining:
            if under_way is None:
                left, now = stopping.remaining, time.perf_counter()
                under_way = _Round(rounds, tokens, length.within(left - 1), now, awaited=True)
                length = lengths.choose(left)
            try:
                draft, verdict = await under_way.result
            except Exception:
                if held.token_ids:
                    yield held
                raise
            now = time.perf_counter()
            ended = verdict.ended or now
            done, under_way = under_way, None
            tokens += verdict.token_ids
            # The next round begins at once, unless text may stop the generation.
            if left := stopping.left_after(verdict.token_ids):
                begun = verdict.following is not None
                under_way = _Round(rounds, tokens, length.within(left - 1), ended, awaited=begun)
                for _ in range(0 if begun else 2):  # so that it is submitted before this round's bookkeeping
                    await asyncio.sleep(0)
            lengths.observe(done.k, draft, verdict, ended - done.started)
            if left:
                length = lengths.choose(left)
                rounds.plan(length)
            stats.spent(draft)
            stats.observe(draft.token_ids, verdict, draft.proposed_by)
            held, since = held + stopping.push(verdict.token_ids, verdict.margins, verdict.logprobs), since or now
            if now - since > TOGETHER or not (left and verdict.following):
                yield held
                held, since = Chunk(), 0.0
    finally:
        await finish(_clean_up(rounds, under_way))


async def _clean_up(rounds: Rounds, under_way: _Round | None) -> None:
    try:
        if under_way:
            await under_way.cancel()
    finally:
        await rounds.close()


class _Round:
    """A round under way. `started`: its earliest possible start. `awaited`: its caller awaits it, without a task."""

    def __init__(self, rounds: Rounds, tokens: Sequence[int], plan: LengthPlan, started: float, awaited: bool) -> None:
        self.k, self.started = plan.k, started
        work = rounds.round(tokens, plan)
        self.result = work if awaited else asyncio.create_task(work, name="round")

    async def cancel(self) -> None:
        if isinstance(self.result, asyncio.Task):
            self.result.cancel()
            await asyncio.gather(self.result, return_exceptions=True)
        else:
            self.result.close()


async def finish(work: Coroutine[Any, Any, None]) -> None:
    """Awaits `work`, which must end by itself, through any cancellations; then raises the cancellation."""
    task = asyncio.create_task(work, name="finish")
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    failed = None if task.cancelled() else task.exception()
    if cancelled is not None:
        raise cancelled
    if failed is not None:
        raise failed
