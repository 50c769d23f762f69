"""Rounds with draft and verification in one local step. The draft model may fail."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence

from tandem.engine.batcher import DeviceLost, StepHung, TimedResult
from tandem.engine.engine import Engine
from tandem.engine.model_drafter import DraftSequence, Unreadable
from tandem.engine.sequences import TargetSequence
from tandem.engine.step_widths import StepWidths
from tandem.engine.stepper import Step, Stepper
from tandem.runners.fused_step import fused
from tandem.runners.protocol import FusedResult, FusedRow, Proposal, ProposeRow, RowFailed, StructureEnded, VerifyRow
from tandem.speculation.fallible import DrafterHealth
from tandem.speculation.lookup_policy import PolicedLookup
from tandem.speculation.loop import Rounds
from tandem.speculation.types import Draft, LengthPlan, Proposer, Request, SpeculationStats, Verdict

log = logging.getLogger("tandem.engine")


class FusedPair:
    """Target and draft engines whose sequences share slot numbers and steps."""

    def __init__(self, target: Engine, draft: Engine, health: DrafterHealth | None = None) -> None:
        self.target, self.draft = target, draft
        self.health = health or DrafterHealth("of this process")
        step = fused(target.runner, draft.runner, self._fell_back)
        ragged = target.runner.shapes.ragged  # else the widest row decides
        self.widths = StepWidths(step) if ragged else None
        self.step = target.shared.with_prefill_rows(self.widths.run if self.widths else step)

    def _fell_back(self, error: Exception) -> None:
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
    """Rounds of a target and a draft model in shared steps; without the model while that fails, or for a copy."""

    def __init__(
        self,
        pair: FusedPair,
        request: Request,
        lookup: PolicedLookup | None = None,
        stats: SpeculationStats | None = None,
        stops: Collection[int] | None = None,  # None: a string may end the text
    ) -> None:
        self._pair, self._request, self._lookup, self._stops = pair, request, lookup, stops
        self._stats = stats if stats is not None else SpeculationStats()
        self._target: TargetSequence | None = None
        self._draft: DraftSequence | None = None
        self.stepper: FusedStepper | None = None
        self._end = 0

    async def open(self, prompt: Sequence[int]) -> None:
        pair, request = self._pair, self._request
        self._target = await TargetSequence.admitted(pair.target, request, len(prompt))
        self._draft = DraftSequence(pair.draft, self._target.slot, request, pair.target.runner.limits.vocab_size)
        self._draft.only_grows = True
        processing = await pair.target.processing(request, len(prompt))
        self._target.processing = self._draft.processing = processing  # a round's steps run one after the other
        if self._lookup:
            await self._lookup.open(prompt)
        self._stats.cached_prompt_tokens = await self._target.begin(prompt)
        self._end = self._target.most_tokens(len(prompt))
        self._step_from(prompt)

    def _step_from(self, tokens: Sequence[int]) -> None:
        if self._target and self._draft:
            pair, lookup = self._pair, self._lookup
            self.stepper = FusedStepper(
                pair.step, self._target, self._draft, lookup, pair.health, tokens, self._stops, self._end, pair.widths
            )
            self._target.set_stepper(self.stepper)

    def plan(self, length: LengthPlan) -> None:
        """Sets the lengths of the rounds that the device begins by itself."""
        if self.stepper:
            self.stepper.plan = self.stepper.latest = length

    async def round(self, tokens: Sequence[int], plan: LengthPlan) -> tuple[Draft, Verdict]:
        """Runs a round; a failed row is retried without a draft, on a refilled slot."""
        try:
            return await self._round(tokens, plan)
        except StructureEnded:
            raise
        except RowFailed:
            assert self._draft
            self._draft.invalidate()  # as the target's sequence does by itself
            return await self._round(tokens, LengthPlan(0, 0))

    async def _round(self, tokens: Sequence[int], plan: LengthPlan) -> tuple[Draft, Verdict]:
        target, stepper, health, trying, skipped = self._target, self.stepper, self._pair.health, False, False
        assert target and stepper and self._draft, "open comes first"
        try:
            if target.device_waits:
                stepper.plan = stepper.latest if stepper.latest.lasts else None
                stepper.asked = plan
                if target.sync_to(tokens):
                    await target.fill(tokens[:-1])
            if (found := await target.next_result()) is None:  # the draft model lacks tokens, or is down
                trying = await self._caught_up(self._draft, tokens)
                skipped, stepper.model_ready = not trying, trying
                found = await target.next_result()
            assert found is not None, "the draft model has caught up, or does not draft"
            row, done = found
            if row.propose.k and not row.copied:
                if done.value.draft_failed:
                    health.failed(RuntimeError(done.value.draft_failed))
                    self._draft.cacheable = False
                elif done.value.proposal.token_ids:
                    health.succeeded()
            if skipped or done.value.draft_failed:
                health.skipped(self._stats)
            return self._read(target, tokens, row, done)
        except StepHung:
            self._draft.held.clear()
            if self._lookup:  # it may have followed tokens that no one read
                await self._lookup.open(tokens)
            self._step_from(tokens)
            raise
        finally:
            if trying:
                health.ended()

    async def _caught_up(self, draft: DraftSequence, tokens: Sequence[int]) -> bool:
        """Fills the draft model's cache; returns whether the model may draft and that worked."""
        health = self._pair.health
        if not health.attempt():
            return False
        try:
            if draft.sync_to(tokens):
                began = time.perf_counter()
                await draft.fill(tokens[: -draft.tail])
                self._stats.prefill_seconds += time.perf_counter() - began
            return True
        except Unreadable:
            health.succeeded()  # it is this request that the model cannot draft for
        except (DeviceLost, RowFailed) as error:
            health.failed(error)
        return False

    def _read(
        self, target: TargetSequence, tokens: Sequence[int], row: FusedRow, done: TimedResult[FusedResult]
    ) -> tuple[Draft, Verdict]:
        verdict, proposed, drafting = done.value.verdict, done.value.proposal, done.value.draft_seconds
        target.verified(tokens[-1], proposed.token_ids, verdict, done, drafting)
        verdict.queue_seconds += drafting - proposed.seconds
        proposers = (Proposer.NGRAM if row.copied else Proposer.MODEL,) * len(proposed.token_ids)
        sent, doubted = proposed.distributions, proposed.doubted
        ahead = verdict.with_prompt  # its time says nothing of a round that waits for its draft
        return Draft(proposed.token_ids, 0.0, proposed.seconds, proposers, sent, done.rows, ahead, doubted), verdict

    async def close(self) -> None:
        if self._draft:
            self._draft.release()
        if self._target:
            self._target.close()
        self._target = self._draft = self.stepper = None


class FusedStepper(Stepper):
    """Makes one request's rows until a token of `stops` (None: text may end it) or `end` tokens."""

    def __init__(
        self,
        step: Step,
        target: TargetSequence,
        draft: DraftSequence,
        lookup: PolicedLookup | None,
        health: DrafterHealth,
        tokens: Sequence[int],
        stops: Collection[int] | None,
        end: int,
        widths: StepWidths | None = None,
    ) -> None:
        self._tokens = list(tokens)
        super().__init__(step, self._tokens)
        self.target, self.draft, self._lookup, self._health = target, draft, lookup, health
        self._end, self._widths = end, widths
        self._stops, self.self_paced = frozenset(stops or ()), stops is not None
        self.asked: LengthPlan | None = None  # lengths of the event loop's row
        self.plan: LengthPlan | None = None  # of rows that the device begins; one that does not last serves one
        self.latest = LengthPlan(0, 0, lasts=False)  # the last plan, for the worth of draft tokens
        self.model_ready: bool | None = None  # set after `next_row` returned None: may the model draft for it?

    def begun(self, row: VerifyRow, verdict: Verdict) -> tuple[FusedRow, FusedResult]:
        return FusedRow(self.target.verify_only_row(self.tokens, 0)), FusedResult(Proposal(()), verdict)

    def follow(self, row: FusedRow, result: FusedResult) -> None:
        new = result.verdict.token_ids
        if result.draft_failed:
            self.plan = None  # the event loop reports it first
        elif result.proposal.token_ids and not row.copied:
            self.draft.proposed(self.tokens, result.proposal.token_ids)
        self._tokens += new
        self.rests = len(self.tokens) >= self._end or not self._stops.isdisjoint(new)
        self.self_paced = self.self_paced and not self.rests

    def next_row(self) -> FusedRow | None:
        """Returns the next row; None without lengths, or if the draft model must catch up or is down."""
        lengths, tokens = self.asked or self.plan, self.tokens
        if lengths is None:
            return None
        most, rests = self._end - len(tokens) - 1, bool(self.latest.of_model and self._widths and self._widths.resting)
        k = min(lengths.copied if rests else lengths.k, most)
        looks_up = self._lookup and k > 0 and self.model_ready is None
        copied = self._lookup.copy(tokens, k).token_ids if self._lookup and looks_up else ()
        k = 0 if copied else self.draft.room(tokens, min(lengths.model_k, most))
        if k and self.model_ready is not False and not rests:
            propose = self._propose_row(k, lengths.least)
        else:
            propose = self.target.verify_only_row(tokens, len(copied))
        if propose is None:
            return None
        if self.asked is None and not lengths.lasts:
            self.plan = None
        self.asked = self.model_ready = None
        worth = self.latest.of_copies if copied else self.latest.of_model
        return FusedRow(propose, copied, self.target.adapter, worth[: k if rests and k else propose.k])

    def _propose_row(self, k: int, least: float) -> ProposeRow | None:
        try:
            able = (self._health.up or self.model_ready) and not self.draft.sync_to(self.tokens)
        except Unreadable:
            able = False
        return self.draft.row(self.tokens, k, least) if able else None
