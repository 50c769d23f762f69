"""Implements Rounds with draft and verification in one local step. The draft model may fail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tandem.engine.batcher import DeviceLost, TimedResult
from tandem.engine.model_drafter import DraftSequence
from tandem.engine.sequences import Engine, KVSequence
from tandem.runners.protocol import FusedResult, FusedRow, ProposeRow, RowFailed, fused
from tandem.speculation.extent import WHOLE, Extent
from tandem.speculation.fallible import Attempt, DrafterHealth
from tandem.speculation.lookup_policy import PolicedLookup
from tandem.speculation.processing import Processing
from tandem.speculation.types import Draft, Proposer, Rule, SamplingParams, SpeculationStats, Verdict, model_part


class FusedPair:
    """Target and draft engines whose sequences share slot numbers and steps; `health` is that of the draft model."""

    def __init__(self, target: Engine, draft: Engine, health: DrafterHealth | None = None) -> None:
        self.target, self.draft = target, draft
        self.health = health or DrafterHealth("of this process")
        self.step = fused(target.runner, draft.runner)


class FusedRounds:
    """Runs draft and verification as one step of the device thread, for one request.

    With a `lookup`, a round that it can answer verifies the copy without running the draft model. If the draft model
    fails, rounds go undrafted and are counted in `stats`; the model is tried again later. `adapter`: as for
    LocalVerifier, and for DraftSequence. `extent`: as for LocalVerifier.
    """

    def __init__(
        self,
        pair: FusedPair,
        margins: bool = False,
        lookup: PolicedLookup | None = None,
        rule: Rule = Rule.AGREEMENT,
        stats: SpeculationStats | None = None,
        logprobs: int | None = None,
        adapter: str = "",
        extent: Extent = WHOLE,
    ) -> None:
        self._adapter, self._extent = adapter, extent
        self._pair, self._margins, self._lookup, self._rule = pair, margins, lookup, rule
        self._logprobs = logprobs
        self._stats = stats if stats is not None else SpeculationStats()
        self._target: KVSequence | None = None
        self._draft: DraftSequence | None = None
        self._sampling = SamplingParams()
        self._processing: Processing | None = None  # of both models: a round's steps run one after the other

    async def open(self, prompt: Sequence[int], sampling: SamplingParams) -> None:
        self._pair.target.admit(sampling, self._logprobs)
        self._sampling = sampling
        self._processing = await self._pair.target.processing(sampling, len(prompt))
        with self._pair.target.adapters.taken(self._adapter) as adapter:
            slot = await self._pair.target.slots.acquire(tokens=self._extent.tokens(len(prompt)))
            self._target = KVSequence(self._pair.target, slot, adapter)
        known = self._pair.target.runner.limits.vocab_size
        self._draft = DraftSequence(self._pair.draft, slot, self._rule, known, self._adapter)
        if self._lookup:
            await self._lookup.open(prompt, sampling)
        self._stats.cached_prompt_tokens = await self._target.fill(prompt[:-1])
        if self._pair.health.up:
            try:
                await self._draft.fill(prompt[:-2])
            except (DeviceLost, RowFailed) as error:
                self._pair.health.failed(error)

    async def round(self, tokens: Sequence[int], k: int, model_k: int | None = None) -> tuple[Draft, Verdict]:
        """Runs a round.

        A row that fails is retried once without a draft, on a refilled slot (see TargetSequence.verify).
        """
        try:
            return await self._round(tokens, k, model_k)
        except RowFailed:
            assert self._target and self._draft
            self._target.distrust()
            self._draft.distrust()
            await self._target.fill(tokens[:-1])
            return await self._round(tokens, 0)

    async def _round(self, tokens: Sequence[int], k: int, model_k: int | None = None) -> tuple[Draft, Verdict]:
        assert self._target and self._draft, "open comes first"
        copied = (await self._lookup.propose(tokens, k)).token_ids if self._lookup and k else ()
        k = model_part(k, model_k)
        attempt = self._pair.health.attempt() if k and not copied else None
        asked = await self._draft_row(self._draft, tokens, k, attempt) if attempt else None
        last = tuple(tokens[-1:])
        plain = ProposeRow(self._target.slot, len(tokens) - 1, last, k if copied else 0, self._sampling, self._rule)
        processor = self._processing.after(tokens) if self._processing else None
        propose, adapter = replace(asked or plain, processor=processor), self._target.adapter
        row = FusedRow(propose, self._margins, copied, self._logprobs, adapter)
        done = await self._pair.target.run(self._pair.step, row)
        result: FusedResult = done.value
        self._pair.target.adapters.committed(adapter, len(result.proposal.token_ids), result.verdict)
        if attempt and asked:
            self._report(attempt, self._draft, tokens, result)
        if k and not copied and (asked is None or result.draft_failed):
            self._pair.health.skipped(self._stats)
        return self._as_round(result, done, Proposer.NGRAM if copied else Proposer.MODEL)

    async def _draft_row(
        self, draft: DraftSequence, tokens: Sequence[int], k: int, attempt: Attempt
    ) -> ProposeRow | None:
        """Returns the row for the draft model, or None if its cache cannot be filled."""
        try:
            return await draft.row(tokens, k, self._sampling)
        except (DeviceLost, RowFailed) as error:
            attempt.failed(error)
            return None

    def _report(self, attempt: Attempt, draft: DraftSequence, tokens: Sequence[int], result: FusedResult) -> None:
        """Reports the outcome of the draft in a step."""
        if result.draft_failed:
            attempt.failed(RuntimeError(result.draft_failed))
            draft.leaves = False
            return
        attempt.succeeded()
        draft.proposed(tokens, result.proposal.token_ids)
        if self._lookup:
            self._lookup.modelled(tokens, result.proposal.token_ids)

    @staticmethod
    def _as_round(result: FusedResult, done: TimedResult[FusedResult], proposer: Proposer) -> tuple[Draft, Verdict]:
        proposed = result.proposal
        waited = done.queue_seconds + result.draft_seconds - proposed.seconds  # includes drafting for other rows
        return (
            Draft(
                proposed.token_ids,
                0.0,
                proposed.seconds,
                (proposer,) * len(proposed.token_ids),
                proposed.distributions,
                done.rows,
            ),
            replace(result.verdict, queue_seconds=waited, compute_seconds=done.compute_seconds - result.draft_seconds),
        )

    def learn(self, tokens: Sequence[int]) -> None:
        if self._lookup:
            self._lookup.learn(tokens)

    async def close(self) -> None:
        if self._target and self._draft:
            self._target.release()
            self._draft.release()
            self._pair.target.slots.release(self._target.slot)
            self._target = self._draft = None
