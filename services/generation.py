"""Generate, the method all three services share."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import replace
from typing import Any, Protocol

from clients import wire
from models.generator import Generator
from services.errors import Interrupted, QueueFull
from services.identity import caller
from services.lifecycle import Lifecycle
from services.limits import Limits, Running
from speculation.types import Chunk, Completion, GenerationRequest, SpeculationStats

Observe = Callable[[GenerationRequest, Completion, float], None]


class Watcher(Protocol):
    """Looks on while one request is answered."""

    def chunk(self, chunk: Chunk) -> None:
        """Whenever a round has committed tokens; the statistics have it."""

    def ended(self, end: Completion | BaseException) -> None:
        """Last, however it ended."""


Watch = Callable[[SpeculationStats], Watcher]


class GenerateMethod:
    """Streams a generator's output as `reply_type` messages.

    The generation runs in a task of its own: a slow reader delays nobody, for what it has not read waits here and not
    in a slot, bounded by what one sequence can hold. A reader that leaves, or whose deadline passes, ends it.
    `queue`: requests that may wait beside those that hold a slot; None: no bound here.
    """

    def __init__(
        self,
        generator: Generator,
        reply_type: Any,
        lifecycle: Lifecycle,
        observe: Observe | None,
        queue: int | None = None,
        watch: Watch | None = None,
        limits: Limits | None = None,
    ) -> None:
        self._generator, self._reply_type = generator, reply_type
        self._lifecycle, self._observe, self._queue, self._watch = lifecycle, observe, queue, watch
        self._limits = limits or Limits()
        self._running = Running(self._limits)
        self._under_way = 0

    async def stream(self, message: Any, seconds: float | None = None) -> AsyncGenerator[Any, None]:
        """`seconds`: until the caller's deadline. Raises Interrupted where the generation fails on the way."""
        request = wire.generation_from_wire(message.generation)
        self._limits.check_prompt(request, self._generator.info.max_sequence_length)
        if seconds is not None:
            request = replace(request, deadline=time.monotonic() + seconds)
        with self._lifecycle.work(), self._running.one(caller()), self._room():
            events: asyncio.Queue[Chunk | Completion | BaseException] = asyncio.Queue(
                self._generator.info.max_sequence_length + 2
            )
            task = asyncio.create_task(self._produce(request, events), name="generate")
            try:
                while True:
                    event = await events.get()
                    if isinstance(event, BaseException):
                        raise event
                    yield self._reply(event)
                    if isinstance(event, Completion):
                        return
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    @contextlib.contextmanager
    def _room(self) -> Iterator[None]:
        slots = self._generator.info.kv_slots
        if self._queue is not None and self._under_way >= slots + self._queue:
            raise QueueFull(f"{self._under_way} requests are under way: {slots} slots and a queue of {self._queue}")
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1

    async def _produce(self, request: GenerationRequest, events: asyncio.Queue[Any]) -> None:
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

    def _reply(self, event: Chunk | Completion) -> Any:
        if isinstance(event, Completion):
            return self._reply_type(completion=wire.completion_to_wire(event))
        return self._reply_type(chunk=wire.chunk_to_wire(event))
