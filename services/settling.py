"""Settles answers of another engine: each is one long draft of the target here, whose own tokens come out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.clients.background_loop import run_apart
from tandem.clients.completion import Completion, Prompt, completion_of, request_of
from tandem.clients.other_engine import OtherEngine
from tandem.engine.batcher import Batcher
from tandem.engine.generator import Generator, RequestDefaults
from tandem.engine.generators import plain_generator
from tandem.engine.load_models import load, load_adapters
from tandem.engine.model_config import ModelConfig
from tandem.receipts.keys import open_keys
from tandem.rpc.credentials import Credentials
from tandem.runners.load_runner import Shape
from tandem.services.receipts import Receipts, generated, written
from tandem.speculation.types import GenerationRequest, SamplingParams, SpeculationStats, common

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from tandem.speculation.request import RequestOptions

KEY_DAYS, LENGTH, PATIENCE = 90.0, 2048, 60.0


@dataclass(frozen=True, slots=True)
class Settled:
    """`written`: tokens of the engine's answer, of which the first `agreed` stayed. `failure`: why it gave none."""

    completion: Completion  # the target's own
    written: int
    agreed: int
    unchanged: bool
    engine_seconds: float
    seconds: float  # without the engine's
    failure: str


@dataclass(frozen=True, slots=True)
class Settler:
    generator: Generator
    receipts: Receipts | None
    engine: OtherEngine
    room: asyncio.Semaphore  # half of the answers are written while half are settled

    async def settle(self, request: GenerationRequest) -> Settled:
        """Raises InvalidField, TooLong."""
        began = time.perf_counter()
        request, text, failure = await written(self.engine, self.generator, request)
        asked = time.perf_counter()
        found = await completion_of(generated(self.receipts, self.generator, request, SpeculationStats()))
        agreed, unchanged = common(request.predicted, found.token_ids), not failure and text == found.text
        seconds = asked - began, time.perf_counter() - asked
        return Settled(found, len(request.predicted), agreed, unchanged, *seconds, failure)


@asynccontextmanager
async def settler(
    models: ModelConfig, engine: OtherEngine, keys: Path | None, defaults: RequestDefaults
) -> AsyncIterator[Settler]:
    """Loads the target. Raises ValueError."""
    opened, batcher = open_keys(keys, KEY_DAYS) if keys else None, Batcher("settle")
    try:
        loaded = await load(models, batcher)
        await load_adapters(models, loaded)
        receipts = Receipts(opened, "settle", lambda: loaded.engine.adapters.revisions) if opened else None
        generator = replace(plain_generator(loaded), defaults=defaults)
        yield Settler(generator, receipts, engine, asyncio.Semaphore(2 * models.shape.slots))
    finally:
        await batcher.close()


def settle(
    prompts: Sequence[Prompt],
    *,
    engine: str,
    model: str | None = None,
    sampling: SamplingParams | None = None,
    stop: str | Sequence[str] = (),
    receipt_keys: str | Path | None = None,
    credentials: Credentials | None = None,
    **options: Unpack[RequestOptions],
) -> list[Settled]:
    """Lets `engine` ("openai=URL") answer the prompts; the target `model` here makes each answer its own, to the bit.

    `receipt_keys`: a folder of keys that sign receipts. Other options are those of `Client.generate`. Raises
    TandemError for a wrong argument, ValueError for a target that cannot be loaded.
    """
    options["receipt"] = receipt_keys is not None
    requests = [request_of(each, sampling, stop, **options) for each in prompts]
    other = OtherEngine("engine", engine, credentials or Credentials(), PATIENCE)
    models, keys = ModelConfig(model=model, shape=Shape(max_length=LENGTH)), receipt_keys and Path(receipt_keys)

    async def settled() -> list[Settled]:
        async with settler(models, other, keys or None, RequestDefaults()) as target:

            async def one(request: GenerationRequest) -> Settled:
                async with target.room:
                    return await target.settle(request)

            return await asyncio.gather(*map(one, requests))

    return run_apart(settled())
