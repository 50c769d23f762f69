"""Implements Drafter on a local draft model, shared by many requests that hold one slot each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from tandem.engine.sequences import Engine, KVSequence
from tandem.runners.protocol import TAIL, ProposeRow
from tandem.speculation.extent import WHOLE, Extent
from tandem.speculation.processing import Processing
from tandem.speculation.types import Draft, Proposer, Rule, SamplingParams, model_part


class DraftSequence(KVSequence):
    """A sequence of the draft model, which proposes under `rule` only token ids below `target_vocab_size`.

    `processing` changes its logits as the target's, so that more drafts are accepted. `adapter`: the name of the
    target's; the draft model has its own of that name, or none.
    """

    def __init__(self, engine: Engine, slot: int, rule: Rule, target_vocab_size: int, adapter: str = "") -> None:
        super().__init__(engine, slot, engine.adapters.take_own(adapter))
        self._rule, self._target_vocab_size = rule, target_vocab_size
        self.processing: Processing | None = None

    async def row(self, tokens: Sequence[int], k: int, sampling: SamplingParams) -> ProposeRow | None:
        """Fills the cache with all of `tokens` but a short tail, and returns the row for the next step."""
        behind = len(tokens) - self.keep(tokens)
        if behind > TAIL:
            await self.fill(tokens[:-2])
            behind = 2
        return self._row(tokens, max(2, behind), k, sampling)

    def _row(self, tokens: Sequence[int], fed: int, k: int, sampling: SamplingParams) -> ProposeRow:
        """Returns the row that feeds the last `fed` of `tokens`."""
        tail = tuple(tokens[-fed:])
        processor = self.processing.after(tokens) if self.processing else None
        return ProposeRow(
            self.slot,
            len(tokens) - 1,
            tail,
            k,
            sampling,
            self._rule,
            self._target_vocab_size,
            processor,
            adapter=self.adapter,
        )

    def proposed(self, tokens: Sequence[int], draft: Sequence[int]) -> None:
        """Records the tokens that a step processed: all but the last draft token, which was only drawn.

        Of a draft that wants accepted tokens fed again, only `tokens`.
        """
        self.held = [*tokens, *(() if self.engine.runner.identity.refeeds else draft[:-1])]


BeginDraft = Callable[[Engine, int, Rule, int, str], DraftSequence]


class ModelDrafter:
    """A local draft model for one request.

    Tokens that the target does not have end the draft, or under the rejection rule are not drawn. `open` waits for a
    slot if all are taken, and raises NoFreeSlot after `slot_seconds` (None: no limit). `second_choices`: drafts have
    them, where the runner reports them. `adapter`: as for DraftSequence. `begin`: makes the sequence of a slot.
    `extent`: as for LocalVerifier.
    """

    def __init__(
        self,
        engine: Engine,
        target_vocab_size: int,
        rule: Rule = Rule.AGREEMENT,
        slot_seconds: float | None = None,
        second_choices: bool = False,
        adapter: str = "",
        begin: BeginDraft = DraftSequence,
        extent: Extent = WHOLE,
    ) -> None:
        self._adapter, self._begin, self._extent = adapter, begin, extent
        self._most_tokens = engine.runner.limits.max_length
        self._second_choices = second_choices
        self._engine, self._target_vocab_size = engine, target_vocab_size
        self._rule, self._slot_seconds = rule, slot_seconds
        self._sequence: DraftSequence | None = None
        self._sampling = SamplingParams()

    async def open(self, prompt: Sequence[int], sampling: SamplingParams) -> None:
        self._sampling = sampling
        processing = await self._engine.draft_processing(sampling, len(prompt))
        slots, most = self._engine.slots, self._extent.tokens(len(prompt))
        slot = await slots.acquire(self._slot_seconds, tokens=most)
        if slots.memory and most is not None:
            self._most_tokens = min(most, self._most_tokens)
        self._sequence = self._begin(self._engine, slot, self._rule, self._target_vocab_size, self._adapter)
        self._sequence.processing = processing
        await self._sequence.fill(prompt[:-2])

    async def propose(self, tokens: Sequence[int], k: int, model_k: int | None = None) -> Draft:
        return await self._propose(tokens, model_part(k, model_k), self._rule)

    async def draft_bonus(self, tokens: Sequence[int]) -> Draft:
        return await self._propose(tokens, 1, Rule.AGREEMENT)

    async def _propose(self, tokens: Sequence[int], k: int, rule: Rule) -> Draft:
        """Proposes tokens. May be cancelled: `held` is updated only after a step, and steps run in order."""
        sequence = self._sequence
        assert sequence is not None, "open comes first"
        k = min(k, self._most_tokens - len(tokens))
        if k <= 0:
            return Draft()
        waited, worked = sequence.queue_seconds, sequence.compute_seconds
        row = await sequence.row(tokens, k, self._sampling)
        if row is None:
            return Draft()
        row = replace(row, rule=rule, second_choices=self._second_choices)
        done = await sequence.step(self._engine.runner.propose, row)
        sequence.proposed(tokens, done.value.token_ids)
        proposal = done.value.within(self._target_vocab_size)
        return Draft(
            proposal.token_ids,
            sequence.queue_seconds - waited + done.queue_seconds,
            sequence.compute_seconds - worked + done.compute_seconds,
            (Proposer.MODEL,) * len(proposal.token_ids),
            proposal.distributions,
            done.rows,
            second_choices=proposal.second_choices,
        )

    async def close(self) -> None:
        if self._sequence:
            self._sequence.release()
            self._engine.slots.release(self._sequence.slot)
            self._sequence = None
