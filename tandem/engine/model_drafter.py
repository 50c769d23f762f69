"""Implements Drafter on a local draft model, shared by requests with a slot each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from tandem.engine.engine import Engine
from tandem.engine.sequences import KVSequence
from tandem.runners.capabilities import No
from tandem.runners.protocol import TAIL, ProposeRow, RowFailed
from tandem.speculation.features import FeatureInbox
from tandem.speculation.rules import known_prefix
from tandem.speculation.types import Draft, LengthPlan, Proposer, Request, Rule


class Unreadable(RowFailed):
    """The draft model's vocabulary, smaller than the target's, lacks a token of the sequence."""


class DraftSequence(KVSequence):
    """A draft's sequence; rejection needs ids below `target_vocab_size`. `only_grows`: rows extend earlier tokens."""

    only_grows = False

    def __init__(self, engine: Engine, slot: int, request: Request, target_vocab_size: int) -> None:
        super().__init__(engine, slot, request, engine.adapters.take_own(request.adapter))
        self._target_vocab_size = target_vocab_size
        self._followed = 0  # the length of the tokens of the last recorded step
        self.keeps_drafts = not engine.can.reprocess_accepted
        self.tail = engine.runner.limits.chunk if engine.can.shared_steps else TAIL  # tokens of a row, at most

    async def fill(self, tokens: Sequence[int]) -> int:
        """Like KVSequence.fill. Raises Unreadable."""
        self._check(tokens)
        return await super().fill(tokens)

    def _check(self, tokens: Sequence[int]) -> None:
        size = self.engine.runner.limits.vocab_size
        if max(tokens[len(self.held) :], default=0) >= size:
            raise Unreadable(f"a token id is outside the draft model's vocabulary of {size}")

    def sync_to(self, tokens: Sequence[int]) -> bool:
        """Drops cached tokens that differ; returns whether too many are missing for a tail. Raises Unreadable."""
        held = self.truncate_to(tokens, self._followed if self.only_grows else 0)
        self._check(tokens)
        return len(tokens) - held > self.tail

    def room(self, tokens: Sequence[int], k: int) -> int:
        """How many of `k` draft tokens fit the model's positions."""
        return max(0, min(k, self.engine.runner.limits.max_length - len(tokens)))

    def row(self, tokens: Sequence[int], k: int, least: float = 0.0) -> ProposeRow | None:
        """Makes the next step's row, with the tokens that the cache lacks."""
        tail = tuple(tokens[-max(2, len(tokens) - len(self.held)) :])
        known, processor = self._target_vocab_size, self.processor(tokens)
        return ProposeRow(self.slot, len(tokens) - 1, tail, k, self.request, known, processor, self.adapter, least)

    def proposed(self, tokens: Sequence[int], draft: Sequence[int]) -> None:
        """Records a step's tokens: all but the last draft token, or only `tokens` if accepted ones are reprocessed."""
        start = min(self._followed, len(self.held))
        self.held[start:] = [*tokens[start:], *(draft[:-1] if self.keeps_drafts else ())]
        self._followed = len(tokens)


BeginDraft = Callable[[Engine, int, Request, int], DraftSequence]


class ModelDrafter:
    """A local draft model for one request; `open` waits for a slot, or raises NoFreeSlot after `slot_seconds`."""

    def __init__(
        self,
        engine: Engine,
        request: Request,
        target_vocab_size: int,
        slot_seconds: float | None = None,
        begin: BeginDraft = DraftSequence,
    ) -> None:
        self._engine, self._request, self._begin = engine, request, begin
        self._most_tokens = engine.runner.limits.max_length
        self._target_vocab_size, self._slot_seconds = target_vocab_size, slot_seconds
        self._agreeing = replace(request, rule=Rule.AGREEMENT)
        self._sequence: DraftSequence | None = None

    async def open(self, prompt: Sequence[int]) -> None:
        if len(prompt) >= self._most_tokens:
            return  # too long to draft for
        slots, most = self._engine.slots, self._request.most_tokens(len(prompt))
        most = most and min(most, self._most_tokens)
        slot = await slots.acquire(self._slot_seconds, tokens=most)
        if slots.memory and most is not None:
            self._most_tokens = most
        self._sequence = self._begin(self._engine, slot, self._request, self._target_vocab_size)
        self._sequence.processing = await self._engine.draft_processing(self._request, len(prompt))
        await self._sequence.fill(prompt[:-2])

    async def draft_bonus(self, tokens: Sequence[int]) -> Draft:
        return await self.propose(tokens, LengthPlan(1, 1), self._agreeing)

    async def propose(self, tokens: Sequence[int], plan: LengthPlan, request: Request | None = None) -> Draft:
        """May be cancelled: `held` changes only after a step, and steps run in order."""
        k = min(plan.model_k, self._most_tokens - len(tokens))
        sequence = self._sequence
        if k <= 0 or sequence is None:  # too long to draft for, as its prompt was
            return Draft()
        waited, worked = sequence.queue_seconds, sequence.compute_seconds
        if sequence.sync_to(tokens):
            await sequence.fill(tokens[:-2])
        row = sequence.row(tokens, k, plan.least)
        if row is None:
            return Draft()
        row = row if request is None else replace(row, request=request)
        done = await sequence.step(self._engine.runner.propose, row)
        sequence.proposed(tokens, done.value.token_ids)
        token_ids = known_prefix(done.value.token_ids, self._target_vocab_size)
        return Draft(
            token_ids,
            sequence.queue_seconds - waited + done.queue_seconds,
            sequence.compute_seconds - worked + done.compute_seconds,
            (Proposer.MODEL,) * len(token_ids),
            done.value.distributions[: len(token_ids)],
            done.rows,
            doubted=done.value.doubted and bool(token_ids),
        )

    async def close(self) -> None:
        if self._sequence:
            self._sequence.close()
            self._sequence = None


class HeadSequence(DraftSequence):
    """A head's sequence, with features from `inbox`; until they come, the head's own states replace them."""

    def __init__(
        self, inbox: FeatureInbox, engine: Engine, slot: int, request: Request, target_vocab_size: int
    ) -> None:
        super().__init__(engine, slot, request, target_vocab_size)
        reads = engine.can.features_in
        assert not isinstance(reads, No), "only heads have inboxes"
        reads.follow(slot, inbox)
        self._inbox, self._epoch, self._sound, self._known = inbox, inbox.epoch, 0, 0
        self.keeps_drafts = True

    async def fill(self, tokens: Sequence[int]) -> int:
        """Like KVSequence.fill, as far as features have come."""
        self._forget_guesses()
        if len(self.held) <= self._inbox.first:
            self.held = list(tokens[: self._inbox.first + 1])
        known = self._known_rows()
        await super().fill(tokens[:known])
        self._sound = len(self.held)
        return 0

    def sync_to(self, tokens: Sequence[int]) -> bool:
        if not self._inbox.handed_out:
            return False
        if self._known_rows() > self._sound or self._epoch != self._inbox.epoch:
            self._forget_guesses()
        self._sound = min(self._sound, self.truncate_to(tokens))
        return len(tokens) - len(self.held) > TAIL or len(self.held) <= self._inbox.first

    def row(self, tokens: Sequence[int], k: int, least: float = 0.0) -> ProposeRow | None:
        """Like DraftSequence.row; None if too many features are missing."""
        if not self._inbox.handed_out:
            return None
        self._known = self._known_rows()
        if len(tokens) - len(self.held) > self.engine.runner.limits.chunk or len(tokens) <= self._inbox.first + 1:
            return None
        return super().row(tokens, k, least)

    def proposed(self, tokens: Sequence[int], draft: Sequence[int]) -> None:
        super().proposed(tokens, draft)
        self._sound = min(self._known, len(tokens))

    def _forget_guesses(self) -> None:
        # after a gap in the features, everything is fed again
        if self._epoch != self._inbox.epoch:
            self._epoch, self._sound = self._inbox.epoch, 0
        del self.held[self._sound :]

    def _known_rows(self) -> int:
        """Number of tokens, from the start, with features."""
        return self._inbox.look() + 1
