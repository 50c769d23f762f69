"""Implements Generate, which all three services share."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from tandem.clients.other_engine import OtherEngine
from tandem.engine.adapter_registry import Adapters
from tandem.engine.generator import Generator
from tandem.engine.slots import reserved_places
from tandem.rpc import wire
from tandem.rpc.channel import MESSAGES
from tandem.services.calls import Context
from tandem.services.receipts import Receipts, generated, written
from tandem.services.security.call_limits import origin
from tandem.services.security.callers import caller
from tandem.services.security.limits import ConcurrencyLimit, ServerLimits, check_name
from tandem.services.shutdown import Lifecycle
from tandem.services.statuses import Interrupted, NotOffered, NotRead, QueueFull, VocabularyMismatch
from tandem.speculation.types import Chunk, GenerationEnd, GenerationRequest, ModelInfo, SpeculationStats

if TYPE_CHECKING:  # metrics are a library that need not be installed
    from tandem.services.observability.generation_metrics import WatchedRequest

Observe = Callable[[GenerationEnd, float], None]
Event: TypeAlias = Chunk | GenerationEnd
Put = Callable[[Event | Exception], None]
Watch = Callable[[SpeculationStats], "WatchedRequest"]


class GenerateMethod:
    """Streams a generator's output as `reply_type` messages.

    A generation buffers its events in a task of its own: a slow client holds neither slot nor queue place.
    `queue`: most requests waiting without a slot, beside places reserved for idle callers; None: no limit.
    `engine`: writes answers, which are settled here.
    """

    def __init__(
        self,
        generator: Generator,
        reply_type: Any,
        lifecycle: Lifecycle,
        observe: Observe | None,
        queue: int | None = None,
        watch: Watch | None = None,
        limits: ServerLimits | None = None,
        receipts: Receipts | None = None,
        engine: OtherEngine | None = None,
    ) -> None:
        self.generator, self.lifecycle, self.limits = generator, lifecycle, limits or ServerLimits()
        self.receipts, self._engine = receipts, engine
        self._reply_type, self._observe, self.queue, self._watch = reply_type, observe, queue, watch
        self._running = self.limits.running()
        self._under_way = ConcurrencyLimit()

    @property
    def under_way(self) -> int:
        return len(self._under_way)

    async def stream(self, message: Any, seconds: float | None = None) -> AsyncGenerator[Any, None]:
        """Yields the replies within `seconds`. Raises Interrupted."""
        self.limits.check_generation(message.generation, self.generator.info.max_sequence_length)
        request = wire.generation_from_wire(message.generation)
        async with contextlib.aclosing(Generations(self, [request], seconds).events()) as events:
            unnamed = request.adapter
            async for _, event in events:
                reply = self.reply(event)
                if unnamed and isinstance(event, Chunk):
                    reply.chunk.adapter, unnamed = unnamed, ""
                yield reply

    def start(self, request: GenerationRequest, put: Put) -> asyncio.Task[None]:
        """Starts a generation, counted against the limits until it ends. Raises LimitReached and QueueFull."""
        with contextlib.ExitStack() as places:
            places.enter_context(self._running.one(caller()))
            places.enter_context(self._place(origin()))
            task = asyncio.create_task(self._produce(request, put), name="generate")
            leaving = places.pop_all()
            task.add_done_callback(lambda _: leaving.close())
        return task

    def _place(self, who: str) -> AbstractContextManager[None]:
        slots, under_way = self.generator.info.kv_slots, self.under_way
        if self.queue is not None:
            reserved = 0 if self._under_way.of(who) else reserved_places(self.queue)
            if under_way >= slots + self.queue + reserved:
                raise QueueFull(f"{under_way} requests are under way: {slots} slots and a queue of {self.queue}")
        return self._under_way.one(who)

    async def _produce(self, request: GenerationRequest, put: Put) -> None:
        started, produced, stats = time.perf_counter(), list[int](), SpeculationStats()
        watcher = self._watch(stats) if self._watch else None
        try:
            if self._engine and request.takes_prediction and not request.drafts_sample:
                request, _, _ = await written(self._engine, self.generator, request)
            async with contextlib.aclosing(generated(self.receipts, self.generator, request, stats)) as events:
                async for event in events:
                    put(event)
                    if isinstance(event, Chunk):
                        produced += event.token_ids
                        if watcher:
                            watcher.chunk(event)
                        continue
                    if self._observe:
                        self._observe(event, time.perf_counter() - started)
                    if watcher:
                        watcher.ended(event)
        except Exception as error:
            put(Interrupted(error, tuple(produced)) if produced else error)
            if watcher:
                watcher.ended(error)
        except asyncio.CancelledError as left:
            if watcher:
                watcher.ended(left)
            raise

    def reply(self, event: Event) -> Any:
        if isinstance(event, GenerationEnd):
            return self._reply_type(completion=wire.completion_to_wire(event))
        return self._reply_type(chunk=wire.chunk_to_wire(event))


class GeneratingService:
    """GetModelInfo and Generate of `service`. `adapters`: those that may change; None: as `info` has them."""

    def __init__(
        self, service: str, info: ModelInfo, generate: GenerateMethod | None, adapters: Adapters | None = None
    ) -> None:
        self._service, self.info, self._generate, self._adapters = service, info, generate, adapters

    async def GetModelInfo(self, request: Any, context: Context) -> Any:
        info = self.info
        if self._adapters is not None:
            info = replace(info, adapters=tuple(self._adapters.revisions.items()))
        reply = getattr(MESSAGES[self._service], f"{self._service}GetModelInfoResponse")
        return reply(model=wire.info_to_wire(info))

    def check_tokenizer(self, sha256: str) -> None:
        """Raises VocabularyMismatch, InvalidField."""
        check_name("tokenizer_sha256", sha256)
        if sha256 and sha256 != (own := self.info.tokenizer_sha256):
            why = f"the caller's tokenizer {sha256[:12]} is not this server's {own[:12]}"
            raise VocabularyMismatch(f"{why}: draft and target must share a vocabulary")

    def Generate(self, request: Any, context: Context) -> AsyncGenerator[Any, None]:
        if self._generate is None:
            raise NotOffered(f"this {self._service} only proposes: it was started without a TargetVerifier")
        return self._generate.stream(request, context.time_remaining())


class Generations:
    """Merges the concurrent generations of one call into one stream of (index, event); `abort` ends it."""

    def __init__(self, method: GenerateMethod, requests: Sequence[GenerationRequest], seconds: float | None) -> None:
        deadline = None if seconds is None else time.monotonic() + seconds
        self._method = method
        self._requests = requests if deadline is None else [replace(each, deadline=deadline) for each in requests]
        self._events: asyncio.Queue[tuple[int, Event | Exception] | None] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._producing, self._ended = len(requests), 0.0

    async def events(self) -> AsyncGenerator[tuple[int, Event], None]:
        unread = len(self._requests)
        with contextlib.ExitStack() as works:
            try:
                for index, request in enumerate(self._requests):
                    works.enter_context(self._method.lifecycle.work())
                    self._tasks.append(self._method.start(request, partial(self._put, index)))
                while unread and (item := await self._events.get()) is not None:
                    index, event = item
                    if isinstance(event, Exception):
                        raise event
                    yield index, event
                    unread -= isinstance(event, GenerationEnd)
                    if unread:
                        self._check_read()
            finally:
                self._cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)

    def abort(self) -> None:
        self._cancel()
        self._events.put_nowait(None)

    def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _put(self, index: int, event: Event | Exception) -> None:
        self._events.put_nowait((index, event))
        if not isinstance(event, Chunk):
            self._producing, self._ended = self._producing - 1, time.monotonic()

    def _check_read(self) -> None:
        seconds = self._method.limits.unread_seconds
        if not self._producing and time.monotonic() - self._ended > seconds:
            raise NotRead(f"the rest of the output was not read within {seconds:g} s")
