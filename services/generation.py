"""Implements Generate, the method that all three services share."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from tandem.engine.generator import Generator
from tandem.engine.slots import reserved_places
from tandem.rpc import wire
from tandem.services.errors import Interrupted, NotRead, QueueFull
from tandem.services.lifecycle import Lifecycle
from tandem.services.load import TokenRate
from tandem.services.security.call_limits import origin
from tandem.services.security.identity import caller
from tandem.services.security.limits import Running, ServerLimits
from tandem.speculation.types import Chunk, GenerationEnd, GenerationRequest, SpeculationStats

Observe = Callable[[GenerationRequest, GenerationEnd, float], None]


class Watcher(Protocol):
    """Observes one request."""

    def chunk(self, chunk: Chunk) -> None:
        """Called when a round has committed tokens. The statistics already include the round."""

    def ended(self, end: GenerationEnd | BaseException) -> None:
        """Called last, however the request ended."""


Watch = Callable[[SpeculationStats], Watcher]


class _Events(asyncio.Queue[Chunk | GenerationEnd | BaseException]):
    """Events of a generation that its client has not read. `ended`: when the generation ended (time.monotonic)."""

    ended: float | None = None


class GenerateMethod:
    """Streams a generator's output as `reply_type` messages.

    Each generation runs in its own task and buffers its events, so a slow client holds neither a slot nor a place in
    the queue. The buffer is bounded by the length of a sequence and, once the generation has ended, by
    `limits.unread_seconds`. If the client leaves or its deadline passes, the generation is cancelled.
    `queue`: requests that may wait besides those with a slot; None: no limit. Some places are reserved for callers that
    have no request running, so that no caller can shut out the others.
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
    ) -> None:
        self.generator, self.lifecycle, self.limits = generator, lifecycle, limits or ServerLimits()
        self.produced = TokenRate()
        self._reply_type, self._observe, self._queue, self._watch = reply_type, observe, queue, watch
        self._running = Running(self.limits)
        self._under_way: Counter[str] = Counter()

    @property
    def under_way(self) -> int:
        """The number of requests that run or wait."""
        return self._under_way.total()

    async def stream(self, message: Any, seconds: float | None = None) -> AsyncGenerator[Any, None]:
        """Yields the replies. `seconds`: time until the caller's deadline. Raises Interrupted on a failure midway."""
        self.limits.check_generation(message.generation, self.generator.info.max_sequence_length)
        request = wire.generation_from_wire(message.generation)
        async with contextlib.aclosing(self.events(request, seconds)) as events:
            unnamed = request.adapter
            async for event in events:
                reply = self._reply(event)
                if unnamed and isinstance(event, Chunk):
                    reply.chunk.adapter, unnamed = unnamed, ""
                yield reply

    async def events(
        self, request: GenerationRequest, seconds: float | None = None
    ) -> AsyncGenerator[Chunk | GenerationEnd, None]:
        """Like `stream`, for a request that was read and checked."""
        if seconds is not None:
            request = replace(request, deadline=time.monotonic() + seconds)
        with self.lifecycle.work():
            events = _Events(self.generator.info.max_sequence_length + 2)
            task = self._started(request, events)
            try:
                while True:
                    event = await events.get()
                    if isinstance(event, BaseException):
                        raise event
                    yield event
                    if isinstance(event, GenerationEnd):
                        return
                    self._check_read(events)
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    def _started(self, request: GenerationRequest, events: _Events) -> asyncio.Task[None]:
        """Starts the generation, which counts against the limits until it ends. Raises LimitReached and QueueFull."""
        with contextlib.ExitStack() as places:
            places.enter_context(self._running.one(caller()))
            places.enter_context(self._place(origin()))
            task = asyncio.create_task(self._produce(request, events), name="generate")
            task.add_done_callback(partial(_leave, places.pop_all()))
        return task

    @contextlib.contextmanager
    def _place(self, who: str) -> Iterator[None]:
        slots, under_way = self.generator.info.kv_slots, self.under_way
        if self._queue is not None:
            reserved = 0 if self._under_way[who] else reserved_places(self._queue)
            if under_way >= slots + self._queue + reserved:
                raise QueueFull(f"{under_way} requests are under way: {slots} slots and a queue of {self._queue}")
        self._under_way[who] += 1
        try:
            yield
        finally:
            self._under_way[who] -= 1
            if not self._under_way[who]:
                del self._under_way[who]

    def _check_read(self, events: _Events) -> None:
        """Raises NotRead if the client reads too slowly after the generation has ended.

        TransportInterceptor handles clients that stop reading completely.
        """
        seconds = self.limits.unread_seconds
        if events.ended is not None and time.monotonic() - events.ended > seconds:
            raise NotRead(f"the rest of the output was not read within {seconds:g} s")

    async def _produce(self, request: GenerationRequest, events: _Events) -> None:
        started, produced, stats = time.perf_counter(), list[int](), SpeculationStats()
        watcher = self._watch(stats) if self._watch else None
        try:
            async with contextlib.aclosing(self.generator.generate(request, stats)) as generated:
                async for event in generated:
                    events.put_nowait(event)
                    if isinstance(event, Chunk):
                        produced += event.token_ids
                        self.produced.add(len(event.token_ids))
                        if watcher:
                            watcher.chunk(event)
                        continue
                    if self._observe:
                        self._observe(request, event, time.perf_counter() - started)
                    if watcher:
                        watcher.ended(event)
        except Exception as error:
            events.put_nowait(Interrupted(error, tuple(produced)) if produced else error)
            if watcher:
                watcher.ended(error)
        except asyncio.CancelledError as left:
            if watcher:
                watcher.ended(left)
            raise
        finally:
            events.ended = time.monotonic()

    def _reply(self, event: Chunk | GenerationEnd) -> Any:
        if isinstance(event, GenerationEnd):
            return self._reply_type(completion=wire.completion_to_wire(event))
        return self._reply_type(chunk=wire.chunk_to_wire(event))


def _leave(places: contextlib.ExitStack, task: asyncio.Task[None]) -> None:
    places.close()
