"""Generate, the method all three services share."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any, Protocol

from clients import wire
from models.generator import Generator
from services.lifecycle import Lifecycle
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

    The generation runs in a task of its own: a slow reader delays nobody, and a reader that leaves ends it.
    """

    def __init__(
        self,
        generator: Generator,
        reply_type: Any,
        lifecycle: Lifecycle,
        observe: Observe | None,
        watch: Watch | None = None,
    ) -> None:
        self._generator, self._reply_type = generator, reply_type
        self._lifecycle, self._observe, self._watch = lifecycle, observe, watch

    async def stream(self, message: Any) -> AsyncGenerator[Any, None]:
        request = wire.generation_from_wire(message.generation)
        with self._lifecycle.work():
            events: asyncio.Queue[Chunk | Completion | BaseException] = asyncio.Queue()
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

    async def _produce(self, request: GenerationRequest, events: asyncio.Queue[Any]) -> None:
        started, stats = time.perf_counter(), SpeculationStats()
        watcher = self._watch(stats) if self._watch else None
        try:
            async with contextlib.aclosing(self._generator.generate(request, stats)) as generated:
                async for event in generated:
                    events.put_nowait(event)
                    if isinstance(event, Completion):
                        if self._observe:
                            self._observe(request, event, time.perf_counter() - started)
                        if watcher:
                            watcher.ended(event)
                    elif watcher:
                        watcher.chunk(event)
        except Exception as error:
            events.put_nowait(error)
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
