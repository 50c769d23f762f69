"""Makes unary calls and counts the bytes of messages."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

import grpc

from tandem.rpc.errors import from_rpc

Message = TypeVar("Message", bound=Any)


class ByteCounts(Protocol):
    bytes_up: int
    bytes_down: int


def sent(message: Message, counts: ByteCounts) -> Message:
    counts.bytes_up += message.ByteSize()
    return message


def received(message: Message, counts: ByteCounts) -> Message:
    counts.bytes_down += message.ByteSize()
    return message


async def unary(
    method: Callable[..., Awaitable[Any]], request: Any, counts: ByteCounts | None = None, **options: Any
) -> Any:
    """Returns the reply to `method` with gRPC's `options`. Raises TandemError."""
    if counts is not None:
        sent(request, counts)
    try:
        reply = await method(request, **options)
    except grpc.RpcError as error:
        raise from_rpc(error) from None
    return reply if counts is None else received(reply, counts)
