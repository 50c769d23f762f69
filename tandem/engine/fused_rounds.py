"""Implements Rounds with draft and verification in one local step. The draft model may fail."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence

from tandem.engine.batcher import DeviceLost, StepHung
from tandem.engine.engine import Engine
from tandem.engine.fused_ahead import RoundsAhead
from tandem.engine.model_drafter import DraftSequence, Unreadable
from tandem.engine.sequences import TargetSequence
from tandem.runners.fused_step import fused
from tandem.runners.protocol import FusedResult, FusedRow, ProposeRow, RowFailed, StructureEnded
from tandem.speculation.fallible import Attempt, DrafterHealth
from tandem.speculation.length import LengthPlan
from tandem.speculation.lookup_policy import PolicedLookup
from tandem.speculation.loop import Rounds
from tandem.speculation.types import Draft, Proposer, Request, SpeculationStats, Verdict, model_part

log = logging.getLogger("tandem.engine")


class FusedPair:
    """Target and draft engines whose sequences share slot numbers and steps; `health` is that of the draft model."""

    def __init__(self, target: Engine, draft: Engine, health: DrafterHealth | None = None) -> None:
        self.target, self.draft = target, draft
        self.health = health or DrafterHealth("of this process")
        self.step = target.shared.beside_prompts(fused(target.runner, draft.runner, self._fell_back))

    def _fell_back(self, error: Exception) -> None:
        """Counts a single call that failed, by the kind of its error, and logs the first of each kind."""
        kind, counts = type(error).__name__, self.target.fused_fallbacks
        counts[kind] += 1
        if counts[kind] == 1:
            log.warning(
                "draft and target did not run as one call (%s: %s): their rows are repeated as two steps; further ones "
                "with this error are only counted (tandem:fused_fallbacks_total)",
                kind,
                error,
                exc_info=error,
            )


class FusedRounds(Rounds):
    """Composes a sequence of the target and one of the draft model, which share their slot's number and their steps.

    With a `lookup`, a round that it can answer verifies the copy without running the draft model. If the draft model
    fails, rounds go undrafted and are counted in `stats`; the model is tried again later. `stops` are the tokens that
    end the text, if only they or its length end it, so that the device may go on with rounds by itself.
    """

    def __init__(
        self,
        pair: FusedPair,
        request: Request,
        lookup: PolicedLookup | None = None,
        stats: SpeculationStats | None = None,
        stops: Collection[int] | None = None,
    ) -> None:
        self._pair, self._request, self._lookup, self._stops = pair, request, lookup, stops
        self._stats = stats if stats is not None else SpeculationStats()
        self._target: TargetSequence | None = None
        self._draft: DraftSequence | None = None
        self.ahead: RoundsAhead | None = None

    async def open(self, prompt: Sequence[int]) -> None:
        pair, request = self._pair, self._request
        self._target = await TargetSequence.admitted(pair.target, request, len(prompt))
        self._draft = DraftSequence(pair.draft, self._target.slot, request, pair.target.runner.limits.vocab_size)
        self._draft.only_grows = True
        processing = await pair.target.processing(request, len(prompt))
        self._target.processing = self._draft.processing = processing  # a round's steps run one after the other
        if self._lookup:
            await self._lookup.open(prompt)
        self._stats.cached_prompt_tokens = await self._target.fill(prompt[:-1])
        if self._stops is not None and processing is None:
            end = request.most_tokens(len(prompt)) or pair.target.runner.limits.max_length
            self.ahead = RoundsAhead(self._target, self._draft, self._lookup, pair.health, self._stops, end)
            self._target.goes_on(self.ahead.follow)

    def plan(self, length: LengthPlan) -> None:
        """Says the lengths of the rounds after the one under way (see `round`), which must have begun."""
        if self.ahead:
            self.ahead.plan = length

    async def round(self, tokens: Sequence[int], k: int, model_k: int | None = None) -> tuple[Draft, Verdict]:
        """Runs a round.

        A row that fails is retried once without a draft, on a refilled slot (see TargetSequence.verify).
        """
        try:
            return await self._round(tokens, k, model_k)
        except StructureEnded:
            raise
        except RowFailed:
            assert self._draft
            self._draft.invalidate()  # as the target's sequence does by itself
            return await self._round(tokens, 0)

    async def _round(self, tokens: Sequence[int], k: int, model_k: int | None = None) -> tuple[Draft, Verdict]:
        assert self._target and self._draft, "open comes first"
        if self._target.lacks(tokens):
            await self._target.fill(tokens[:-1])
        row = self.ahead.foreseen(tokens) if self.ahead else None
        if row:
            k, copied = row.propose.k, row.copied
        else:
            copied = self._lookup.copy(tokens, k).token_ids if self._lookup and k else ()
            k = model_part(k, model_k) if copied else self._draft.room(tokens, model_part(k, model_k))
        attempt = (Attempt(self._pair.health) if row else self._pair.health.attempt()) if k and not copied else None
        try:
            return await self._attempted(tokens, k, copied, attempt, row)
        finally:
            if attempt:
                attempt.ended()

    async def _attempted(
        self, tokens: Sequence[int], k: int, copied: tuple[int, ...], attempt: Attempt | None, row: FusedRow | None
    ) -> tuple[Draft, Verdict]:
        assert self._target and self._draft
        asked = row.propose if row and attempt else None
        if row is None:
            asked = await self._draft_row(self._draft, tokens, k, attempt) if attempt else None
            row = FusedRow(asked or self._target.undrafted(tokens, k if copied else 0), copied, self._target.adapter)
            if self.ahead:
                self.ahead.begin(tokens)
        try:
            done = await self._target.step(self._pair.step, row)
        except StepHung:
            self._draft.held.clear()
            raise
        result: FusedResult = done.value
        proposed = result.proposal
        drafting, waited = result.draft_seconds, done.queue_seconds + result.draft_seconds - proposed.seconds
        verdict = self._target.verified(
            tokens, proposed.token_ids, result.verdict, waited, done.compute_seconds - drafting, done.ended
        )
        if attempt and asked:
            self._report(attempt, self._draft, tokens, result)
        if k and not copied and (asked is None or result.draft_failed):
            self._pair.health.skipped(self._stats)
        proposers = (Proposer.NGRAM if copied else Proposer.MODEL,) * len(proposed.token_ids)
        draft = Draft(proposed.token_ids, 0.0, proposed.seconds, proposers, proposed.distributions, done.rows)
        return draft, verdict

    async def _draft_row(
        self, draft: DraftSequence, tokens: Sequence[int], k: int, attempt: Attempt
    ) -> ProposeRow | None:
        """Returns the row for the draft model, or None if its cache cannot be filled."""
        try:
            if draft.lacks(tokens):
                began = time.perf_counter()
                await draft.fill(tokens[:-2])
                self._stats.prefill_seconds += time.perf_counter() - began
            return draft.row(tokens, k)
        except Unreadable:
            attempt.succeeded()  # it is this request that the model cannot draft for
            return None
        except (DeviceLost, RowFailed) as error:
            attempt.failed(error)
            return None

    def _report(self, attempt: Attempt, draft: DraftSequence, tokens: Sequence[int], result: FusedResult) -> None:
        """Reports the outcome of the draft in a step."""
        if result.draft_failed:
            attempt.failed(RuntimeError(result.draft_failed))
            draft.cacheable = False
            return
        attempt.succeeded()
        draft.proposed(tokens, result.proposal.token_ids)

    async def close(self) -> None:
        if self._draft:
            self._draft.release()
        if self._target:
            self._target.close()
        self._target = self._draft = None
