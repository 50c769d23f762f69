"""Implements Verifier on a local runner, shared by many requests that hold one slot each."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Hashable, Sequence
from typing import TYPE_CHECKING, Any

from tandem.engine.batcher import Step, TimedResult
from tandem.engine.engine import Engine
from tandem.engine.run_ahead import Follow, RunAhead
from tandem.engine.shared_steps import Prompt
from tandem.runners.feature_rows import FeatureRow
from tandem.runners.pages import PAGE
from tandem.runners.protocol import PrefillRow, ProposeRow, RowFailed, StructureEnded, VerifyRow
from tandem.speculation.common_prefix import common
from tandem.speculation.features import FeatureSpec
from tandem.speculation.processing import Processing, Processor
from tandem.speculation.types import Request, SparseDistribution, SpeculationStats, Verdict

if TYPE_CHECKING:
    from typing_extensions import Self


class KVSequence:
    """The KV cache of one request's sequence in one slot. `held`: the tokens whose keys and values it holds.

    Its rows have `request`, `adapter` (the number of the request's, taken for it; `release` gives it back) and what
    `processing` makes of their tokens. It looks prefixes up, and inserts them, in the scope of the caller, among those
    of the same adapter; not if `cacheable` is false, because the cache may be corrupt.
    """

    cacheable = True

    processing: Processing | None = None

    _follow: Follow | None = None

    def __init__(self, engine: Engine, slot: int, request: Request, adapter: int = 0) -> None:
        self.engine, self.slot, self.request, self.adapter = engine, slot, request, adapter
        self.held: list[int] = []
        self._ahead: RunAhead | None = None
        self.scope = engine.prefixes.scope(adapter) if engine.prefixes else None
        self._failures = engine.batcher.failures
        self._invalid = False
        self.queue_seconds = 0.0
        self.compute_seconds = 0.0

    @classmethod
    async def admitted(
        cls,
        engine: Engine,
        request: Request,
        prompt_length: int,
        seconds: float | None = None,
        name: Hashable = None,
    ) -> Self:
        """Waits for a slot, and takes it with the request's adapter. `seconds`, `name`: see SlotPool.

        Raises InvalidField if the engine cannot do what the request asks for, TooManyWaiting, NoFreeSlot.
        """
        engine.admit(request)
        await engine.check_structure(request)
        with engine.adapters.taken(request.adapter) as adapter:
            return cls(
                engine, await engine.slots.acquire(seconds, name, request.most_tokens(prompt_length)), request, adapter
            )

    def processor(self, tokens: Sequence[int]) -> Processor | None:
        """Returns the logits processing of a row that extends `tokens`."""
        return self.processing.after(tokens) if self.processing else None

    def truncate_to(self, tokens: Sequence[int], start: int = 0) -> int:
        """Drops what is not the common prefix with `tokens`; returns its length.

        Positions below `start` are known to agree.
        """
        length = common(self.held, tokens, start)
        del self.held[length:]
        return length

    def step(self, step: Step, row: Any, prefill: bool = False) -> Coroutine[Any, Any, TimedResult[Any]]:
        """Runs a row of this sequence (see Engine.run)."""
        return self.engine.run(step, row, prefill, self)

    def ahead(self, prefill: bool) -> RunAhead | None:
        """Returns what the device thread may have run of the next row; a prefill row drops it."""
        if prefill:
            self.stop_ahead()
        elif self._follow and (self._ahead is None or self._ahead.over):
            self._ahead = RunAhead(self._follow, self._at_once)
        return self._ahead

    def goes_on(self, follow: Follow | None, at_once: Callable[[], bool] = lambda: False) -> None:
        """Sets what makes the next row on the device thread after each row that is not prefill (None: nothing).

        `at_once`: see RunAhead.
        """
        self.stop_ahead()
        self._follow, self._at_once = follow, at_once

    @property
    def foreseen(self) -> Any:
        """The row that the device thread runs next by itself, or has run; None if there is none."""
        return self._ahead.next if self._ahead else None

    def stop_ahead(self) -> None:
        """Drops what the device thread has foreseen."""
        if self._ahead:
            self._ahead.end()
            self._ahead = None

    async def fill(self, tokens: Sequence[int]) -> int:
        """Processes the part of `tokens` that is not held yet, in chunks, between which other rows' steps run.

        Much of it may be processed elsewhere. Returns how many of them were copied from known prefixes instead.
        """
        remote = None if self._invalid else self.engine.remote_prefill
        found = await remote.fill(self, tokens) if remote else None
        total, began = found or 0, len(self.held) if found is None else -1
        chunk = self.engine.runner.limits.chunk
        while (start := len(self.held)) < len(tokens):
            prompt = Prompt(self.scope, tuple(tokens), self._invalid, start == began) if self.engine.prefixes else None
            row = PrefillRow(self.slot, start, tuple(tokens[start : start + chunk]), self.adapter, prompt)
            done = await self.step(self.engine.shared.prompts, row, prefill=True)
            self.queue_seconds += done.queue_seconds
            self.compute_seconds += done.compute_seconds
            copied = done.value or 0
            self._invalid = False
            self.held += tokens[start : start + copied + chunk]
            total += copied
        return total

    def invalidate(self) -> None:
        """Forgets what is held, since it may be unsound: it is processed again, not copied."""
        self.stop_ahead()
        self.held.clear()
        self._invalid = True

    def close(self) -> None:
        """Releases the sequence and its slot. Call it once."""
        self.release()
        self.engine.slots.release(self.slot)

    def release(self) -> None:
        """Leaves what is held to later sequences, without waiting, and gives back the adapter. Call it once.

        The slot may be given to others at once.
        """
        self.stop_ahead()
        self.engine.adapters.give_back(self.adapter)
        prefixes, batcher = self.engine.prefixes, self.engine.batcher
        if prefixes is None or not self.cacheable or len(self.held) < PAGE or self.engine.lost.is_set():
            return
        scope, held, slot, failures = self.scope, tuple(self.held), self.slot, self._failures

        def insert() -> None:
            if batcher.failures == failures:  # else a step may have spoiled the slot before this sequence heard of it
                prefixes.insert(scope, held, slot)

        batcher.between_steps(insert)


class TargetSequence(KVSequence):
    """A sequence of the target: prefilled, then used to verify round by round."""

    async def verify(
        self, tokens: Sequence[int], draft: Sequence[int], distributions: Sequence[SparseDistribution] = ()
    ) -> Verdict:
        """Runs one pass over [last of tokens, draft...]; the accepted tokens stay held.

        A row that fails is retried once on a refilled slot, since leftovers of an earlier sequence may be the cause.
        """
        position = len(tokens) - 1
        row = VerifyRow(
            self.slot,
            position,
            tokens[-1],
            tuple(draft),
            self.request,
            tuple(distributions),
            self.processor(tokens),
            self.adapter,
        )
        for again in (True, False):
            try:
                if self.lacks(tokens):
                    await self.fill(tokens[:-1])
                done = await self.step(self.engine.verify, row)
                break
            except StructureEnded:
                raise
            except RowFailed:
                if not again:
                    raise
        return self.verified(tokens, draft, done.value, done.queue_seconds, done.compute_seconds, done.ended)

    def verified(
        self,
        tokens: Sequence[int],
        draft: Sequence[int],
        verdict: Verdict,
        queue_seconds: float,
        seconds: float,
        ended: float,
    ) -> Verdict:
        """Records a step that verified `draft` after `tokens`, of which all but the last were held, in `seconds`.

        Returns its verdict with these times: every verdict of this process gets them here.
        """
        verdict.queue_seconds, verdict.compute_seconds, verdict.ended = queue_seconds, seconds, ended
        self.held += [tokens[-1], *draft[: verdict.accepted]]
        self.engine.adapters.committed(self.adapter, len(draft), verdict)
        return verdict

    def undrafted(self, tokens: Sequence[int], k: int) -> ProposeRow:
        """Returns a fused row's part of the draft model, for a round in which that model does not run."""
        processor = self.processor(tokens)
        return ProposeRow(self.slot, len(tokens) - 1, (tokens[-1],), k, self.request, processor=processor)

    async def features(self, spec: FeatureSpec, start: int, end: int) -> bytes:
        """Returns the features of the held positions from `start` up to `end`."""
        handed = self.engine.features
        assert handed is not None and end <= len(self.held), "a target that hands none out grants none"
        if start >= end:
            return b""
        done = await self.step(handed.read, FeatureRow(self.slot, start, end - start, spec), prefill=True)
        found: bytes = done.value
        return found

    def lacks(self, tokens: Sequence[int]) -> bool:
        """Drops what is not of all `tokens` but the last, which extend those of the round before.

        Returns whether some of them are missing, and must be filled before the next row.
        """
        position = len(tokens) - 1
        self.truncate_to(tokens, start=max(0, position - 1))
        del self.held[position:]
        return len(self.held) < position


class LocalVerifier:
    """A local target for one request; `open` waits for a slot if all are taken. `stats` gets what was cached."""

    def __init__(self, engine: Engine, request: Request, stats: SpeculationStats | None = None) -> None:
        self._engine, self._request = engine, request
        self._stats = stats if stats is not None else SpeculationStats()
        self._sequence: TargetSequence | None = None

    async def open(self, prompt: Sequence[int]) -> None:
        """Takes a slot and processes the prompt, unless that was done. Raises InvalidField, NoFreeSlot."""
        if self._sequence is None:
            self._sequence = await TargetSequence.admitted(self._engine, self._request, len(prompt))
            self._sequence.processing = await self._engine.processing(self._request, len(prompt))
            self._stats.cached_prompt_tokens = await self._sequence.fill(prompt[:-1])

    def most_tokens(self, prompt_length: int) -> int:
        """Returns how many tokens a sequence may have that begins with such a prompt."""
        return self._request.most_tokens(prompt_length) or self._engine.runner.limits.max_length

    def goes_on(self, follow: Follow | None, at_once: Callable[[], bool] = lambda: False) -> None:
        """Calls KVSequence.goes_on, unless the sequence is closed."""
        if self._sequence:
            self._sequence.goes_on(follow, at_once)

    async def verify(
        self, tokens: Sequence[int], draft: Sequence[int], distributions: Sequence[SparseDistribution] = ()
    ) -> Verdict:
        assert self._sequence is not None, "open comes first"
        return await self._sequence.verify(tokens, draft, distributions)

    async def close(self) -> None:
        if self._sequence:
            self._sequence.close()
            self._sequence = None
