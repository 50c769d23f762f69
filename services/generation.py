"""Generate, the method all three services share."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

from clients import wire
from models.generator import Generator
from services.identity import caller
from services.lifecycle import Lifecycle
from services.limits import Limits, Running
from speculation.types import Chunk, Completion, GenerationRequest

Observe = Callable[[GenerationRequest, Completion, float], None]


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
        limits: Limits | None = None,
    ) -> None:
        self._generator, self._reply_type = generator, reply_type
        self._limits = limits or Limits()
        self._running = Running(self._limits)
        self._lifecycle, self._observe = lifecycle, observe

    async def stream(self, message: Any) -> AsyncGenerator[Any, None]:
        request = wire.generation_from_wire(message.generation)
        self._limits.check_prompt(request, self._generator.info.max_sequence_length)
        with self._lifecycle.work(), self._running.one(caller()):
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
        started = time.perf_counter()
        try:
            async with contextlib.aclosing(self._generator.generate(request)) as generated:
                async for event in generated:
                    events.put_nowait(event)
                    if self._observe and isinstance(event, Completion):
                        self._observe(request, event, time.perf_counter() - started)
        except Exception as error:
            events.put_nowait(error)

    def _reply(self, event: Chunk | Completion) -> Any:
        if isinstance(event, Completion):
            return self._reply_type(completion=wire.completion_to_wire(event))
        return self._reply_type(chunk=wire.chunk_to_wire(event))
