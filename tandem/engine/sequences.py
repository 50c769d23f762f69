"""Implements Verifier on a local runner, shared by many requests that hold one slot each."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tandem.engine.adapters import Adapters
from tandem.engine.batcher import Batcher, DeviceLost, Step, StepHung, TimedResult
from tandem.engine.features import FeatureRow, HandedFeatures, hand_out
from tandem.engine.prefill_elsewhere import Brought, PrefillElsewhere
from tandem.engine.prefix_cache import Filled, PrefixCache
from tandem.engine.slots import SlotPool
from tandem.engine.structures import Structures
from tandem.runners.pages import PAGE
from tandem.runners.protocol import (
    PrefillRow,
    RowFailed,
    Runner,
    VerifyRow,
    verify_sized,
)
from tandem.speculation.extent import WHOLE, Extent
from tandem.speculation.features import FeatureSpec
from tandem.speculation.processing import Processing
from tandem.speculation.types import (
    InvalidField,
    Rule,
    SamplingParams,
    SparseDistribution,
    SpeculationStats,
    Verdict,
)

log = logging.getLogger("tandem.engine")


class Engine:
    """A runner, its slots and the batcher of its device thread.

    If a whole step of a `vital` engine fails, the engine is lost with all its sequences and raises DeviceLost from then
    on, because the state of its device cannot be trusted. An engine that only drafts may be tried again. A step that
    hangs may still return: the engine is lost only when StepWatch gives up on it. `structures`: those of the model's
    tokenizer; None if structured output is not possible.
    """

    def __init__(
        self, runner: Runner, batcher: Batcher, vital: bool = True, structures: Structures | None = None
    ) -> None:
        self.runner, self.batcher, self.vital, self._structures = runner, batcher, vital, structures
        self.slots = SlotPool(runner.limits.slots)
        self.adapters = Adapters(runner, batcher)
        batcher.serves(self.slots)
        self.verify = functools.partial(verify_sized, runner)
        self.prefixes: PrefixCache | None = None
        self.elsewhere: PrefillElsewhere | None = None
        self.features: HandedFeatures | None = None
        self.lost = asyncio.Event()
        self._cause = ""
        self._bound: list[Engine] = []

    async def hand_out_features(self, layers: Sequence[int] = ()) -> None:
        """Makes verdicts have features where rows ask for them, once, before any sequence. Raises ValueError.

        `layers`: the usual ones by default (see tandem/checkpoints/head_config.py).
        """
        self.features = await self.batcher.on_device(hand_out, self.runner, tuple(layers))
        self.verify = functools.partial(self.features.verify, self.verify)

    async def run(self, step: Step, row: Any, prefill: bool = False) -> TimedResult[Any]:
        """Runs `row` in the next `step` that has room. Raises RowFailed, StepHung, or DeviceLost."""
        if self.lost.is_set():
            raise DeviceLost(self._cause)
        try:
            return await self.batcher.run(step, row, 1 if prefill else self.runner.limits.slots, prefill)
        except StepHung:
            raise
        except DeviceLost as error:
            if self.vital:
                if not self.lost.is_set():
                    log.error("a step failed: %s", str(error).partition("\n")[0])
                self.lose(error)
            raise

    def lose(self, error: DeviceLost) -> None:
        """Marks the engine as lost: it is not used again, and requests that wait for a slot get `error`."""
        if not self.lost.is_set():
            self._cause = str(error)
            self.lost.set()
            self.slots.close(error)
            for other in self._bound:
                other.lose(error)

    def bind(self, other: Engine) -> None:
        """Makes the loss of either engine the loss of both: their models are on one device."""
        self._bound.append(other)
        other._bound.append(self)

    def answers(self, sampling: SamplingParams, logprobs: int | None = None) -> bool:
        """Whether a request asks for nothing that needs logits which stay on the device."""
        return not self.runner.identity.greedy_only or (sampling.greedy and not sampling.processed and logprobs is None)

    def admit(self, sampling: SamplingParams, logprobs: int | None = None) -> None:
        """Raises InvalidField if this runner does not support the sampling parameters or log-probabilities."""
        identity, size = self.runner.identity, self.runner.limits.vocab_size
        for token, _ in sampling.logit_bias[-1:]:
            if token >= size:
                raise InvalidField("logit_bias", f"token id {token} is outside the vocabulary of {size}")
        for name in (*sampling.processed, *(("logprobs",) if logprobs is not None else ())):
            if identity.greedy_only:
                raise InvalidField(
                    name, f"not available: this server's {identity.backend} model keeps its logits on the device"
                )
        if sampling.structure and self._structures is None:
            raise InvalidField("structure", f"not available with this server's {identity.backend} model")
        if identity.greedy_only and not sampling.greedy:
            raise InvalidField(
                "temperature",
                f"{sampling.temperature}: this server's {identity.backend} model keeps its logits on the device, so it "
                "decodes greedily only: temperature 0",
            )

    async def processing(
        self, sampling: SamplingParams, prompt_length: int, tokens: Sequence[int] = ()
    ) -> Processing | None:
        """Returns the logits processing of an admitted request, or None if it asks for none.

        `tokens`: those known so far, prompt included. Raises InvalidField if the output in them does not match the
        structure, or if that cannot be enforced.
        """
        if not sampling.processed:
            return None
        matcher = None
        if sampling.structure and self._structures:
            matcher = await self._structures.matcher(sampling.structure)
        processing = Processing(sampling, prompt_length, matcher)
        if not processing.matches(tokens):
            raise InvalidField("prefix", "the output in it does not match the structure")
        return processing

    async def draft_processing(self, sampling: SamplingParams, prompt_length: int) -> Processing | None:
        """Like `processing`, for drafts: what cannot be done is left out, because the target does it in any case."""
        if self.runner.identity.greedy_only:
            return None
        try:
            return await self.processing(sampling, prompt_length)
        except InvalidField:
            return await self.processing(replace(sampling, structure=None), prompt_length)


class KVSequence:
    """The KV cache of one sequence in one slot. `held`: the tokens whose keys and values it holds.

    It finds and leaves prefixes in the scope of the request that makes it, among those of the same adapter. `leaves`:
    what is held is sound. `adapter`: the number of the one that its rows have, taken for it; `release` gives it back.
    """

    leaves = True

    def __init__(self, engine: Engine, slot: int, adapter: int = 0) -> None:
        self.engine, self.slot, self.adapter = engine, slot, adapter
        self.held: list[int] = []
        self.scope = (engine.prefixes.scope_of(), adapter) if engine.prefixes else None
        self._failures = engine.batcher.failures
        self._distrusts = False
        self.queue_seconds = 0.0
        self.compute_seconds = 0.0

    def keep(self, tokens: Sequence[int], start: int = 0) -> int:
        """Keeps the common prefix with `tokens` and drops the rest; returns its length.

        Positions below `start` are known to agree.
        """
        length = min(start, len(self.held), len(tokens))
        while length < min(len(self.held), len(tokens)) and self.held[length] == tokens[length]:
            length += 1
        del self.held[length:]
        return length

    async def step(self, step: Step, row: Any, prefill: bool = False) -> TimedResult[Any]:
        """Like Engine.run. After a step that hung the content of the slot is unknown, so it counts as empty.

        After a row that failed it is processed again, since what was copied to it may be the cause.
        """
        try:
            return await self.engine.run(step, row, prefill)
        except StepHung:
            self.held.clear()
            raise
        except RowFailed:
            self.distrust()
            raise

    async def fill(self, tokens: Sequence[int]) -> int:
        """Processes the part of `tokens` that is not held yet, in chunks, between which other rows' steps run.

        Much of it may be processed elsewhere. Returns how many of them were copied from known prefixes instead.
        """
        elsewhere = None if self._distrusts else self.engine.elsewhere
        brought = await elsewhere.fill(self, tokens) if elsewhere else Brought()
        copied, began = brought.copied, -1 if brought.looked else len(self.held)
        chunk = self.engine.runner.limits.chunk
        while (start := len(self.held)) < len(tokens):
            row = PrefillRow(self.slot, start, tuple(tokens[start : start + chunk]), self.adapter)
            done = await self.step(self._prefill_step(tokens, start == began), row, prefill=True)
            self.queue_seconds += done.queue_seconds
            self.compute_seconds += done.compute_seconds
            filled = done.value or Filled(start + len(row.tokens), 0)
            self._distrusts = False
            self.held += tokens[start : filled.held]
            copied += filled.copied
        return copied

    def _prefill_step(self, tokens: Sequence[int], first: bool) -> Step:
        """Returns the step for the next chunk of `tokens`. Steps that know prefixes are shared by no other row."""
        prefixes = self.engine.prefixes
        if prefixes is None:
            return self.engine.runner.prefill
        return functools.partial(prefixes.prefill, self.scope, tuple(tokens), self._distrusts, first)

    def distrust(self) -> None:
        """Forgets what is held, since it may be unsound: it is processed again, not copied."""
        self.held.clear()
        self._distrusts = True

    def release(self) -> None:
        """Leaves what is held to later sequences, without waiting. The slot may be given to others at once.

        Call it once: it gives back the adapter.
        """
        self.engine.adapters.give_back(self.adapter)
        prefixes, batcher = self.engine.prefixes, self.engine.batcher
        if prefixes is None or not self.leaves or len(self.held) < PAGE or self.engine.lost.is_set():
            return
        scope, held, slot, failures = self.scope, tuple(self.held), self.slot, self._failures

        def keep() -> None:
            if batcher.failures == failures:  # else a step may have spoiled the slot before this sequence heard of it
                prefixes.keep(scope, held, slot)

        batcher.between_steps(keep)


class TargetSequence(KVSequence):
    """A sequence of the target: prefilled, then used to verify round by round, with its logits `processing`."""

    processing: Processing | None = None

    async def verify(
        self,
        tokens: Sequence[int],
        draft: Sequence[int],
        sampling: SamplingParams,
        margins: bool = False,
        rule: Rule = Rule.AGREEMENT,
        distributions: Sequence[SparseDistribution] = (),
        logprobs: int | None = None,
        features: FeatureSpec | None = None,
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
            sampling,
            margins,
            rule,
            tuple(distributions),
            self.processing.after(tokens) if self.processing else None,
            logprobs,
            self.adapter,
            features,
        )
        self.keep(tokens[:position], start=max(0, position - 1))
        try:
            done = await self._filled_run(tokens[:position], row)
        except RowFailed:
            done = await self._filled_run(tokens[:position], row)
        verdict = done.value
        self.held += [tokens[-1], *draft[: verdict.accepted]]
        self.engine.adapters.committed(self.adapter, len(draft), verdict)
        return replace(verdict, queue_seconds=done.queue_seconds, compute_seconds=done.compute_seconds)

    async def features(self, spec: FeatureSpec, start: int, end: int) -> bytes:
        """Returns the features of the held positions from `start` up to `end`."""
        handed = self.engine.features
        assert handed is not None and end <= len(self.held), "a target that hands none out grants none"
        if start >= end:
            return b""
        done = await self.step(handed.read, FeatureRow(self.slot, start, end - start, spec), prefill=True)
        found: bytes = done.value
        return found

    async def _filled_run(self, prefix: Sequence[int], row: VerifyRow) -> TimedResult[Verdict]:
        """Fills the cache with `prefix` and runs `row`. Raises RowFailed, after which nothing is held."""
        await self.fill(prefix)
        return await self.step(self.engine.verify, row)


class LocalVerifier:
    """A local target for one request; `open` waits for a slot if all are taken. `stats` gets what was cached.

    `extent`: how long the sequence may become. `adapter`: the name of the one that the request has, empty for none;
    `open` raises InvalidField if there is none so.
    """

    def __init__(
        self,
        engine: Engine,
        margins: bool = False,
        rule: Rule = Rule.AGREEMENT,
        logprobs: int | None = None,
        stats: SpeculationStats | None = None,
        adapter: str = "",
        extent: Extent = WHOLE,
    ) -> None:
        self._adapter, self._extent = adapter, extent
        self._stats = stats if stats is not None else SpeculationStats()
        self._engine, self._margins, self._rule, self._logprobs = engine, margins, rule, logprobs
        self._sequence: TargetSequence | None = None
        self._sampling = SamplingParams()

    async def open(self, prompt: Sequence[int], sampling: SamplingParams) -> None:
        """Takes a slot and processes the prompt, unless that was done."""
        if self._sequence:
            return
        self._engine.admit(sampling, self._logprobs)
        self._sampling = sampling
        processing = await self._engine.processing(sampling, len(prompt))
        with self._engine.adapters.taken(self._adapter) as adapter:
            slot = await self._engine.slots.acquire(tokens=self._extent.tokens(len(prompt)))
            self._sequence = TargetSequence(self._engine, slot, adapter)
        self._sequence.processing = processing
        self._stats.cached_prompt_tokens = await self._sequence.fill(prompt[:-1])

    async def verify(
        self, tokens: Sequence[int], draft: Sequence[int], distributions: Sequence[SparseDistribution] = ()
    ) -> Verdict:
        assert self._sequence is not None, "open comes first"
        return await self._sequence.verify(
            tokens, draft, self._sampling, self._margins, self._rule, distributions, self._logprobs
        )

    async def close(self) -> None:
        if self._sequence:
            self._sequence.release()
            self._engine.slots.release(self._sequence.slot)
            self._sequence = None
