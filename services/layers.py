"""Defines the layers of a server's interceptor: each wraps every call and observes its messages.

The first layer is the outermost: it sees the call first and its status last.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

import grpc

from tandem.rpc.tracing import Span

OURS = ("/tandem.v1.", "/vllm.grpc.engine.")
"""How the methods begin of services whose calls are observed and logged."""


@dataclass(slots=True, eq=False)
class Call:
    """One call of `path` (/PACKAGE.SERVICE/METHOD), as its layers see it.

    `request_id` and `span` are set at its start, `code`, `reason` (of ErrorInfo) and `message` at its end. `message`
    never quotes the request, so it may be logged. `dialogue`: its requests are a stream; `in_run`: a run, by now.
    `unanswered`: the requests that replies to come may answer, and when each was read.
    """

    path: str
    metadata: Sequence[tuple[str, str | bytes]]
    layers: Sequence[Layer]
    dialogue: bool = False
    request_id: str = ""
    started: float = field(default_factory=time.perf_counter)
    code: str = ""
    reason: str = ""
    message: str = ""
    span: Span | None = None
    in_run: bool = False
    unanswered: deque[tuple[Any, float]] = field(default_factory=deque)
    context: grpc.aio.ServicerContext = field(init=False)
    method: str = field(init=False)
    """The path without its package, as in TargetVerifier/Verify."""
    _message_layers: Sequence[Layer] = field(init=False)

    def __post_init__(self) -> None:
        self.method = self.path.rpartition(".")[2]
        self.layers = [layer for layer in self.layers if layer.covers(self.path)]
        self._message_layers = [layer for layer in self.layers if layer.sees_messages]

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started

    def given(self, key: str) -> list[str]:
        """Returns the values that the caller gave for a key of the metadata."""
        return [value for name, value in self.metadata if name == key and isinstance(value, str)]

    @contextlib.asynccontextmanager
    async def answered(self, context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
        """Runs the block, which reads the request and makes the replies, inside all layers."""
        self.context = context
        async with contextlib.AsyncExitStack() as stack:
            for layer in self.layers:
                await stack.enter_async_context(layer.around(self))
            yield

    def received(self, message: Any, size: int | None = None) -> Any:
        """Passes a message that was received to the layers, and returns it. None: it could not be parsed."""
        for layer in self._message_layers:
            layer.received(self, message, size)
        return message

    def replied(self, reply: Any) -> Any:
        """Passes a reply that was made to the layers, and returns it."""
        for layer in self._message_layers:
            layer.replied(self, reply)
        return reply

    def sent(self, size: int) -> None:
        for layer in self._message_layers:
            layer.sent(self, size)


class Layer:
    """Wraps every call that it covers. The defaults do nothing. `sees_messages`: besides calls."""

    sees_messages = False

    def covers(self, path: str) -> bool:
        return path.startswith(OURS)

    def around(self, call: Call) -> AbstractAsyncContextManager[None]:
        """Wraps a call, from before its request is read to after its last reply is made. May raise to refuse it."""
        return contextlib.nullcontext()

    def received(self, call: Call, message: Any, size: int | None) -> None:
        """A message was received, of `size` bytes where that is known. None: it could not be parsed."""

    def replied(self, call: Call, reply: Any) -> None:
        """A reply was made."""

    def sent(self, call: Call, size: int) -> None:
        """A reply of `size` bytes was sent. For a unary reply, this comes after `around`."""
