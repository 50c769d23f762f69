"""Layers wrap every call and observe its messages; the first is outermost."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import grpc
from google.rpc import status_pb2

from tandem.rpc.tracing import Span

Context: TypeAlias = grpc.aio.ServicerContext
OURS = ("/tandem.v1.", "/vllm.grpc.engine.")  # prefixes of logged and measured methods


@dataclass(slots=True, eq=False)
class Call:
    """One call of `path` (/PACKAGE.SERVICE/METHOD); `code`, `reason` and `message` are set at its end.

    `message` never quotes the request: it may be logged. `dialogue`: requests stream. `in_run`: is a run by now.
    `unanswered`: requests and read times. `done`: how its generations ended, for the log.
    """

    path: str
    metadata: Sequence[tuple[str, str | bytes]]
    layers: Sequence[Layer]
    dialogue: bool = False
    request_id: str = ""
    started: float = field(default_factory=time.perf_counter)
    status: status_pb2.Status | None = None  # of a call that failed
    code: str = ""
    reason: str = ""
    message: str = ""
    span: Span | None = None
    in_run: bool = False
    done: dict[str, Any] = field(default_factory=dict)
    unanswered: deque[tuple[Any, float]] = field(default_factory=deque)
    context: Context = field(init=False)
    method: str = field(init=False)  # as in TargetVerifier/Verify
    _message_layers: Sequence[Layer] = field(init=False)

    def __post_init__(self) -> None:
        self.method = self.path.rpartition(".")[2]
        self.layers = [layer for layer in self.layers if layer.covers(self.path)]
        self._message_layers = [layer for layer in self.layers if layer.sees_messages]

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started

    def given(self, key: str) -> list[str]:
        return [value for name, value in self.metadata if name == key and isinstance(value, str)]

    @contextlib.asynccontextmanager
    async def answered(self, context: Context) -> AsyncIterator[None]:
        """Runs the block inside all layers."""
        self.context = context
        async with contextlib.AsyncExitStack() as stack:
            for layer in self.layers:
                await stack.enter_async_context(layer.around(self))
            yield

    def received(self, message: Any, size: int | None = None) -> Any:
        for layer in self._message_layers:
            layer.received(self, message, size)
        return message

    def replied(self, reply: Any) -> Any:
        for layer in self._message_layers:
            layer.replied(self, reply)
        return reply

    def sent(self, size: int) -> None:
        for layer in self._message_layers:
            layer.sent(self, size)


class Layer:
    """Wraps calls that it covers; defaults do nothing. `sees_messages`: wants `received`, `replied` and `sent`."""

    sees_messages = False

    def covers(self, path: str) -> bool:
        return path.startswith(OURS)

    def around(self, call: Call) -> AbstractAsyncContextManager[None]:
        """Wraps a call from before its request is read until its last reply is made. May raise to refuse it."""
        return contextlib.nullcontext()

    def received(self, call: Call, message: Any, size: int | None) -> None:
        """A message of `size` bytes (None: unknown) was received; `message` None: not parsed."""

    def replied(self, call: Call, reply: Any) -> None:
        """A reply was made."""

    def sent(self, call: Call, size: int) -> None:
        """A reply was sent; if unary, after `around`."""
