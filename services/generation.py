"""Generate, the method all three services share."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from tandem.engine.generator import Generator
from tandem.rpc import wire
from tandem.services.errors import Interrupted, NotRead, QueueFull
from tandem.services.lifecycle import Lifecycle
from tandem.services.security.call_limits import origin
from tandem.services.security.identity import caller
from tandem.services.security.limits import Running, ServerLimits
from tandem.speculation.types import Chunk, GenerationEnd, GenerationRequest, SpeculationStats

KEPT = 1 / 8
"""Of the queue's places, as many again wait for callers that have nothing under way."""

Observe = Callable[[GenerationRequest, GenerationEnd, float], None]


class Watcher(Protocol):
    """Looks on while one request is answered."""

    def chunk(self, chunk: Chunk) -> None:
        """Whenever a round has committed tokens; the statistics have it."""

    def ended(self, end: GenerationEnd | BaseException) -> None:
        """Last, however it ended."""


Watch = Callable[[SpeculationStats], Watcher]


class _Events(asyncio.Queue[Chunk | GenerationEnd | BaseException]):
    """What a generation has said and its reader has not read. `whole`: when it ended (time.monotonic)."""

    whole: float | None = None


class GenerateMethod:
    """Streams a generator's output as `reply_type` messages.

    The generation runs in a task of its own: a slow reader delays nobody, for what it has not read waits here and not
    in a slot or in a place of the queue, bounded by what one sequence can hold, and, once that is whole, by
    `limits.unread_seconds`. A reader that leaves, or whose deadline passes, ends it.
    `queue`: requests that may wait beside those that hold a slot; None: no bound here. An eighth more may wait for
    callers that have nothing under way, so that none can keep all others out.
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
        self._generator, self._reply_type = generator, reply_type
        self._lifecycle, self._observe, self._queue, self._watch = lifecycle, observe, queue, watch
        self._limits = limits or ServerLimits()
        self._running = Running(self._limits)
        self._under_way: Counter[str] = Counter()

    async def stream(self, message: Any, seconds: float | None = None) -> AsyncGenerator[Any, None]:
        """`seconds`: until the caller's deadline. Raises Interrupted where the generation fails on the way."""
        self._limits.check_generation(message.generation, self._generator.info.max_sequence_length)
        request = wire.generation_from_wire(message.generation)
        if seconds is not None:
            request = replace(request, deadline=time.monotonic() + seconds)
        with self._lifecycle.work():
            events = _Events(self._generator.info.max_sequence_length + 2)
            task = self._started(request, events)
            try:
                while True:
                    event = await events.get()
                    if isinstance(event, BaseException):
                        raise event
                    yield self._reply(event)
                    if isinstance(event, GenerationEnd):
                        return
                    self._check_read(events)
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    def _started(self, request: GenerationRequest, events: _Events) -> asyncio.Task[None]:
        """The generation, which has its place until it ends, read or not. Raises LimitReached and QueueFull."""
        with contextlib.ExitStack() as places:
            places.enter_context(self._running.one(caller()))
            places.enter_context(self._room(origin()))
            task = asyncio.create_task(self._produce(request, events), name="generate")
            task.add_done_callback(partial(_leave, places.pop_all()))
        return task

    @contextlib.contextmanager
    def _room(self, who: str) -> Iterator[None]:
        slots, under_way = self._generator.info.kv_slots, self._under_way.total()
        if self._queue is not None:
            kept = 0 if self._under_way[who] else math.ceil(self._queue * KEPT)
            if under_way >= slots + self._queue + kept:
                raise QueueFull(f"{under_way} requests are under way: {slots} slots and a queue of {self._queue}")
        self._under_way[who] += 1
        try:
            yield
        finally:
            self._under_way[who] -= 1
            if not self._under_way[who]:
                del self._under_way[who]

    def _check_read(self, events: _Events) -> None:
        """Raises NotRead where a reply that was whole long ago still waits. (A reader that stands still altogether is
        the transport's concern.)"""
        seconds = self._limits.unread_seconds
        if events.whole is not None and time.monotonic() - events.whole > seconds:
            raise NotRead(f"the rest was not read within {seconds:g} s")

    async def _produce(self, request: GenerationRequest, events: _Events) -> None:
        started, produced, stats = time.perf_counter(), list[int](), SpeculationStats()
        watcher = self._watch(stats) if self._watch else None
        try:
            async with contextlib.aclosing(self._generator.generate(request, stats)) as generated:
                async for event in generated:
                    events.put_nowait(event)
                    if isinstance(event, Chunk):
                        produced += event.token_ids
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
            events.whole = time.monotonic()

    def _reply(self, event: Chunk | GenerationEnd) -> Any:
        if isinstance(event, GenerationEnd):
            return self._reply_type(completion=wire.completion_to_wire(event))
        return self._reply_type(chunk=wire.chunk_to_wire(event))


def _leave(places: contextlib.ExitStack, task: asyncio.Task[None]) -> None:
    places.close()
