"""A Verifier on a local runner; requests hold one slot each."""

from __future__ import annotations

from collections.abc import Coroutine, Hashable, Sequence
from typing import TYPE_CHECKING, Any

from tandem.engine.batcher import TimedResult
from tandem.engine.engine import Engine
from tandem.engine.stepper import CachedPrompt, Step, Stepper
from tandem.runners.capabilities import PAGE, FeatureRow
from tandem.runners.protocol import PrefillRow, ProposeRow, RowFailed, StructureEnded, VerifyRow
from tandem.speculation.features import FeatureSpec
from tandem.speculation.processing import Processing, Processor
from tandem.speculation.rounds import VerifierHere
from tandem.speculation.run_on import SelfPacedRun
from tandem.speculation.types import Request, SparseDistribution, SpeculationStats, Verdict, common

if TYPE_CHECKING:
    from typing_extensions import Self


class KVSequence:
    """One request's KV cache in one slot; prefixes are shared within the caller's scope and the adapter."""

    cacheable = True  # False: the cache may be corrupt

    processing: Processing | None = None

    _stepper: Stepper | None = None
    _then: VerifyRow | None = None  # for the prompt's last step
    begun: tuple[VerifyRow, Verdict] | None = None  # that row, once it has run

    def __init__(self, engine: Engine, slot: int, request: Request, adapter: int = 0) -> None:
        self.engine, self.slot, self.request, self.adapter = engine, slot, request, adapter
        self.held: list[int] = []
        self.scope = engine.prefixes.scope(adapter) if engine.prefixes else None
        self._failures = engine.batcher.failures
        self._invalid = False
        self.queue_seconds = 0.0
        self.compute_seconds = 0.0

    @classmethod
    async def admitted(
        cls, engine: Engine, request: Request, prompt_length: int, seconds: float | None = None, name: Hashable = None
    ) -> Self:
        """Waits for a slot, and takes it with the adapter. Raises InvalidField, TooManyWaiting, NoFreeSlot."""
        engine.admit(request)
        await engine.check_structure(request)
        with engine.adapters.taken(request.adapter) as adapter:
            return cls(
                engine, await engine.slots.acquire(seconds, name, request.most_tokens(prompt_length)), request, adapter
            )

    def processor(self, tokens: Sequence[int]) -> Processor | None:
        return self.processing.after(tokens) if self.processing else None

    def truncate_to(self, tokens: Sequence[int], start: int = 0) -> int:
        """Keeps the common prefix with `tokens`; returns its length. Positions below `start` agree."""
        length = common(self.held, tokens, start)
        del self.held[length:]
        return length

    def step(self, step: Step, row: Any, prefill: bool = False) -> Coroutine[Any, Any, TimedResult[Any]]:
        """Runs a row (see Engine.run)."""
        return self.engine.run(step, row, prefill, self)

    def set_stepper(self, stepper: Stepper | None) -> None:
        """Replaces the stepper of `next_result`; drops the rows of the one before."""
        if self._stepper:
            self._stepper.end()
        self._stepper = stepper

    @property
    def device_waits(self) -> bool:
        """Whether the device has begun no unread row."""
        return self._stepper is None or not self._stepper.unread

    async def next_result(self) -> tuple[Any, TimedResult[Any]] | None:
        """Returns the stepper's next row and result; None, at once, without one."""
        stepper, engine = self._stepper, self.engine
        assert stepper is not None, "set_stepper comes first"
        engine.check_lost()
        begun, self.begun = self.begun, None
        if begun and begun[0].position == len(self.held):  # else the prompt was cut since
            begun[1].with_prompt = True
            row, value = stepper.begun(*begun)
            if (following := stepper.after(row, value)) is not None:  # begins before other requests' replies
                result = engine.begin(stepper.step, following, stepper=stepper)
                stepper.unread.appendleft((following, result))  # the device may have begun further rows since
            return row, TimedResult(value, 0.0, 0.0)  # its seconds are the prompt's
        if stepper.unread:
            row, result = stepper.unread.popleft()
        elif stepper.error:
            raise stepper.error
        elif (row := stepper.next_row()) is None:
            return None
        else:
            result = engine.begin(stepper.step, row, stepper=stepper)
        return row, await engine.result(result, self)

    async def fill(self, tokens: Sequence[int]) -> int:
        """Processes the tokens not yet held, in chunks, here or elsewhere; returns the number copied from prefixes."""
        remote = None if self._invalid else self.engine.remote_prefill
        found = await remote.fill(self, tokens) if remote else None
        total, began = found or 0, len(self.held) if found is None else -1
        chunk = self.engine.runner.limits.chunk
        while (start := len(self.held)) < len(tokens):
            prompt = (
                CachedPrompt(self.scope, tuple(tokens), self._invalid, start == began) if self.engine.prefixes else None
            )
            then = self._then if prompt or start + chunk >= len(tokens) else None
            row = PrefillRow(self.slot, start, tuple(tokens[start : start + chunk]), self.adapter, prompt, then)
            done = await self.step(self.engine.shared.prompts, row, prefill=True)
            self.queue_seconds += done.queue_seconds
            self.compute_seconds += done.compute_seconds
            copied, verdict = done.value
            self._invalid = False
            self.held += tokens[start : start + copied + chunk]
            total += copied
            self.begun = (then, verdict) if then and verdict else None
        self._then = None
        return total

    def invalidate(self) -> None:
        """Forgets the tokens held, which may be unsound."""
        self.held.clear()
        self._invalid = True

    def close(self) -> None:
        """Releases sequence and slot, once."""
        self.release()
        self.engine.slots.release(self.slot)

    def release(self) -> None:
        """Schedules insertion into the prefix cache and releases the adapter, once; does not block."""
        self.set_stepper(None)
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
    """A sequence of the target, which verifies round by round."""

    async def begin(self, prompt: Sequence[int], verifies: bool = True) -> int:
        """Fills all but the prompt's last token; the first round, undrafted, shares the last step if it `verifies`."""
        shares = verifies and self.engine.shared.able and not self.request.drafts_sample
        self._then = self.verify_row(prompt, ()) if shares else None
        return await self.fill(prompt[:-1])

    def verify_row(
        self,
        tokens: Sequence[int],
        draft: Sequence[int],
        distributions: Sequence[SparseDistribution] = (),
        copied: bool = False,
    ) -> VerifyRow:
        """Returns the row that verifies a draft after `tokens`."""
        return VerifyRow(
            self.slot,
            len(tokens) - 1,
            tokens[-1],
            tuple(draft),
            self.request,
            tuple(distributions),
            self.processor(tokens),
            self.adapter,
            copied,
        )

    async def verify(
        self, tokens: Sequence[int], draft: Sequence[int], distributions: Sequence[SparseDistribution] = ()
    ) -> Verdict:
        """Runs one pass over [last of tokens, draft...]; accepted tokens stay held."""
        self.set_stepper(GivenRow(self.engine.verify, tokens, self.verify_row(tokens, draft, distributions)))
        found = await self.next_verdict()
        assert found is not None
        return found[1]

    async def next_verdict(self) -> tuple[VerifyRow, Verdict] | None:
        """Returns the stepper's next row and verdict, or None; retries a failed row once, on a refilled slot."""
        assert self._stepper is not None, "set_stepper comes first"
        tokens = self._stepper.tokens
        for again in (True, False):
            try:
                if self.device_waits and self.sync_to(tokens):
                    await self.fill(tokens[:-1])
                found = await self.next_result()
                break
            except StructureEnded:
                raise
            except RowFailed:
                if not again:
                    raise
        if found is None:
            return None
        row, done = found
        self.verified(row.last_token, row.draft, done.value, done)
        return row, done.value

    def verified(
        self, last_token: int, draft: Sequence[int], verdict: Verdict, done: TimedResult[Any], drafting: float = 0.0
    ) -> None:
        """Records a step that verified `draft`, after `drafting` seconds of it; sets the verdict's times."""
        verdict.queue_seconds, verdict.compute_seconds = done.queue_seconds, done.compute_seconds - drafting
        verdict.ended = done.ended
        if not self.device_waits and self._stepper:
            result = self._stepper.unread[0][1]
            verdict.following = result.done() and not result.cancelled() and result.exception() is None
        self.held += [last_token, *draft[: verdict.accepted]]

    def verify_only_row(self, tokens: Sequence[int], k: int) -> ProposeRow:
        """Returns the draft's part of a fused row for a round without the draft model."""
        processor = self.processor(tokens)
        return ProposeRow(self.slot, len(tokens) - 1, (tokens[-1],), k, self.request, processor=processor)

    def most_tokens(self, prompt_length: int) -> int:
        return self.request.most_tokens(prompt_length) or self.engine.runner.limits.max_length

    async def features(self, spec: FeatureSpec, start: int, end: int) -> bytes:
        """Returns the features of held positions from `start` to `end`."""
        handed = self.engine.features
        assert handed is not None and end <= len(self.held), "a target that hands none out grants none"
        if start >= end:
            return b""
        done = await self.step(handed.read, FeatureRow(self.slot, start, end - start, spec), prefill=True)
        found: bytes = done.value
        return found

    def sync_to(self, tokens: Sequence[int]) -> bool:
        """Drops tokens not in tokens[:-1], an extension of the last round's; returns whether some are missing."""
        position = len(tokens) - 1
        self.truncate_to(tokens, start=max(0, position - 1))
        del self.held[position:]
        return len(self.held) < position


class GivenRow(Stepper):
    """One row: verifies a draft from elsewhere."""

    def __init__(self, step: Step, tokens: Sequence[int], row: VerifyRow) -> None:
        super().__init__(step, tokens)
        self._row = row

    def next_row(self) -> VerifyRow:
        return self._row


class RunStepper(Stepper):
    """Makes a run's rows, with the drafts that came, until it pauses."""

    def __init__(self, sequence: TargetSequence, run: SelfPacedRun, self_paced: bool = True) -> None:
        super().__init__(sequence.engine.verify, run.tokens)
        self._sequence, self._run, self.self_paced = sequence, run, self_paced

    @property
    def notifies_each_step(self) -> bool:
        return self._run.client_is_drafting

    def follow(self, row: VerifyRow, result: Verdict) -> None:
        self._run.follow(result.token_ids)

    def next_row(self) -> VerifyRow | None:
        draft = self._run.next_draft()
        self.rests = draft is None
        return None if draft is None else self._sequence.verify_row(self.tokens, draft, copied=self._run.copied)


class LocalVerifier(VerifierHere):
    """A local target for one request; `stats` counts cached tokens."""

    def __init__(self, engine: Engine, request: Request, stats: SpeculationStats | None = None) -> None:
        self._engine, self._request = engine, request
        self._stats = stats if stats is not None else SpeculationStats()
        self.sequence: TargetSequence | None = None

    async def open(self, prompt: Sequence[int], begins: bool = False) -> None:
        """Takes a slot, processes the prompt, and `begins` the first round, once. Raises InvalidField, NoFreeSlot."""
        if self.sequence is None:
            self.sequence = await TargetSequence.admitted(self._engine, self._request, len(prompt))
            self.sequence.processing = await self._engine.processing(self._request, len(prompt))
            self._stats.cached_prompt_tokens = await self.sequence.begin(prompt, begins)

    async def verify(
        self, tokens: Sequence[int], draft: Sequence[int], distributions: Sequence[SparseDistribution] = ()
    ) -> Verdict:
        assert self.sequence is not None, "open comes first"
        return await self.sequence.verify(tokens, draft, distributions)

    async def close(self) -> None:
        if self.sequence:
            self.sequence.close()
            self.sequence = None
