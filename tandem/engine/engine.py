"""A model's engine: runner, slots, adapters, prefixes and structures."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tandem.checkpoints.head_config import default_layers
from tandem.engine.adapter_registry import Adapters
from tandem.engine.batcher import Batcher, DeviceLost, StepHung, TimedResult
from tandem.engine.compatibility import able, refusal, sentence
from tandem.engine.fair_turns import TooManyWaiting
from tandem.engine.prefix_cache import PrefixCache
from tandem.engine.slots import SlotPool
from tandem.engine.stepper import SharedSteps, Step, Stepper
from tandem.engine.structures import Structures
from tandem.runners.capabilities import FeatureRow, HandedOut, No
from tandem.runners.protocol import RowFailed, Runner, VerifyRow, verify_sized
from tandem.speculation.features import FeatureSpec
from tandem.speculation.processing import Processing
from tandem.speculation.types import InvalidField, Request, Verdict

if TYPE_CHECKING:
    from tandem.engine.prefill import RemotePrefill
    from tandem.engine.sequences import KVSequence

log = logging.getLogger("tandem.engine")
OPENING_BYTES = 2 << 20  # features in the reply to an opening, at most; gRPC's limit for a message is 4 MiB


class Engine:
    """A runner, its slots and its batcher. A failed step loses a `vital` engine: its device's state is unknown."""

    def __init__(
        self, runner: Runner, batcher: Batcher, vital: bool = True, structures: Structures | None = None
    ) -> None:
        self.runner, self.batcher, self.vital, self.structures = runner, batcher, vital, structures
        self.can = able(runner)
        self.slots = SlotPool(runner.limits.slots)
        self.adapters = Adapters(runner, batcher)
        batcher.serves(self.slots)
        self.prefixes: PrefixCache | None = None
        self.shared = SharedSteps(runner, self.can.shared_steps, lambda: self.prefixes)
        self.verify = self.shared.with_prefill_rows(functools.partial(verify_sized, runner))
        self.remote_prefill: RemotePrefill | None = None
        self.features: HandedFeatures | None = None
        self.lost = asyncio.Event()
        self.fused_fallbacks: Counter[str] = Counter()  # failed calls of draft and target in one, by kind of error
        self._cause = ""
        self._bound: list[Engine] = []

    @property
    def arithmetic(self) -> str:
        """Names what logits' bits depend on besides weights and number format; empty: unknown."""
        return "" if isinstance(pages := self.runner.capabilities.pages, No) else pages.format

    async def hand_out_features(self, layers: Sequence[int] = ()) -> None:
        """Verdicts have features on request; call it before any sequence. Raises ValueError."""
        self.features = await self.batcher.on_device(hand_out, self.runner, tuple(layers))
        self.can = able(self.runner)
        sized = functools.partial(verify_sized, self.runner)
        self.verify = self.shared.with_prefill_rows(functools.partial(self.features.verify, sized))

    async def run(
        self, step: Step, row: Any, prefill: bool = False, sequence: KVSequence | None = None
    ) -> TimedResult[Any]:
        """Runs `row` in the next `step` with room. Raises RowFailed, StepHung, or DeviceLost."""
        return await self.result(self.begin(step, row, prefill), sequence)

    def begin(
        self, step: Step, row: Any, prefill: bool = False, stepper: Stepper | None = None
    ) -> asyncio.Future[TimedResult[Any]]:
        """Queues `row`, made by `stepper`, for the next `step` with room. Raises DeviceLost."""
        self.check_lost()
        return self.batcher.run(step, row, *self.shared.room(row, prefill), prefill, stepper)

    async def result(
        self, result: asyncio.Future[TimedResult[Any]], sequence: KVSequence | None = None
    ) -> TimedResult[Any]:
        """Waits for a row's result; a failed row invalidates `sequence`. Raises RowFailed, StepHung, or DeviceLost."""
        try:
            return await result
        except StepHung:
            if sequence:
                sequence.set_stepper(None)
                sequence.held.clear()
            raise
        except RowFailed:
            if sequence:
                sequence.invalidate()
            raise
        except DeviceLost as error:
            if self.vital:
                if not self.lost.is_set():
                    log.error("a step failed: %s", str(error).partition("\n")[0])
                self.lose(error)
            raise

    def check_lost(self) -> None:
        if self.lost.is_set():
            raise DeviceLost(self._cause)

    def lose(self, error: DeviceLost) -> None:
        """Marks the engine as lost; requests that wait for a slot get `error`."""
        if not self.lost.is_set():
            self._cause = str(error)
            self.lost.set()
            self.slots.close(error)
            for other in self._bound:
                other.lose(error)

    def bind(self, other: Engine) -> None:
        """Makes the loss of either engine, on one device, the loss of both."""
        self._bound.append(other)
        other._bound.append(self)

    def answers(self, request: Request) -> bool:
        """Whether the request needs no logits that stay on the device."""
        plain = request.sampling.greedy and not request.sampling.processed and request.logprobs is None
        return plain or not isinstance(self.can.logits, No)

    def admit(self, request: Request) -> None:
        """Raises InvalidField for requests that this runner does not support."""
        sampling, size = request.sampling, self.runner.limits.vocab_size
        model, logits = f"this server's {self.runner.identity.backend} model", self.can.logits
        for token, _ in sampling.logit_bias[-1:]:
            if token >= size:
                raise InvalidField("logit_bias", f"token id {token} is outside the vocabulary of {size}")
        for name in (*sampling.processed, *(("logprobs",) if request.logprobs is not None else ())):
            if isinstance(logits, No):
                raise InvalidField(name, f"not available: {sentence(model, 'logits', logits)}")
        if sampling.structure and self.structures is None:
            reason = f": {self.can.structures}" if isinstance(self.can.structures, No) else ""
            raise InvalidField("structure", f"not available with {model}{reason}")
        if isinstance(logits, No) and not sampling.greedy:
            why = sentence(model, "logits", logits)
            raise InvalidField("temperature", f"{sampling.temperature}: {why}; ask for temperature 0")

    async def check_structure(self, request: Request) -> None:
        """Checks an admitted request's structure, before it takes a slot. Raises InvalidField, TooManyWaiting."""
        if request.sampling.structure and self.structures:
            await self.structures.check(request.sampling.structure)

    async def processing(self, request: Request, prompt_length: int, tokens: Sequence[int] = ()) -> Processing | None:
        """The processing of a request with a slot and known `tokens`, prompt included, or None. Raises InvalidField."""
        sampling, matcher = request.sampling, None
        if not sampling.processed:
            return None
        output = tokens[prompt_length:]
        if sampling.structure and self.structures:
            matcher = await self.structures.matcher(sampling.structure, output)
        return Processing(sampling, prompt_length, matcher, output)

    async def draft_processing(self, request: Request, prompt_length: int) -> Processing | None:
        """Like `processing`, without what a draft cannot do: the target does it anyway."""
        if isinstance(self.can.logits, No):
            return None
        try:
            return await self.processing(request, prompt_length)
        except (InvalidField, TooManyWaiting):
            unstructured = replace(request, sampling=replace(request.sampling, structure=None))
            return await self.processing(unstructured, prompt_length)


Verify = Callable[[Sequence[VerifyRow]], list[Verdict | RowFailed]]


@dataclass(frozen=True, slots=True)
class HandedFeatures:
    """A target's features after `layers`. Methods with rows are steps."""

    layers: tuple[int, ...]
    hidden_size: int
    source: HandedOut

    def spec(self, layers: Sequence[int]) -> FeatureSpec:
        """A session's grant. Raises InvalidField for a layer that is not handed out."""
        for layer in layers:
            if layer not in self.layers:
                known = ", ".join(map(str, self.layers))
                raise InvalidField("features.layers", f"{layer} is not handed out here: {known} are")
        return FeatureSpec(tuple(layers), self.hidden_size)

    def verify(self, verify: Verify, rows: Sequence[VerifyRow]) -> list[Verdict | RowFailed]:
        """Verifies, with features in the verdicts of rows that request them."""
        verdicts = verify(rows)
        asked = [
            (verdict, FeatureRow(row.slot, row.position, verdict.accepted + 1, row.request.features))
            for row, verdict in zip(rows, verdicts, strict=True)
            if isinstance(row, VerifyRow) and isinstance(verdict, Verdict) and row.request.features is not None
        ]
        for (verdict, _), found in zip(asked, self.read([row for _, row in asked]), strict=True):
            verdict.features = found
        return verdicts

    def read(self, rows: Sequence[FeatureRow]) -> list[bytes]:
        chosen = []
        for row, values in zip(rows, self.source.read(rows) if rows else (), strict=True):
            by_layer = values.reshape(row.count, len(self.layers), self.hidden_size)
            chosen.append(row.spec.encode(by_layer[:, [self.layers.index(layer) for layer in row.spec.layers]]))
        return chosen


def hand_out(runner: Runner, layers: tuple[int, ...]) -> HandedFeatures:
    """Makes a target's steps hand out features; on the device thread. Raises ValueError, one line."""
    out = able(runner).features_out
    if isinstance(out, No):
        raise refusal("hand_out_features", runner.identity.model_name, "features_out", out)
    chosen = layers or default_layers(out.layer_count)
    if not all(1 <= layer <= out.layer_count for layer in chosen):
        given = ", ".join(map(str, chosen))
        raise ValueError(f"hand_out_features: layers {given} are not all within 1 to {out.layer_count}")
    try:
        return HandedFeatures(chosen, out.hidden_size, out.hand_out(chosen))
    except ValueError as error:
        raise ValueError(f"hand_out_features: not with these steps, use --compile native or off: {error}") from None
