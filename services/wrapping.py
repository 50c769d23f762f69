"""A method's handler with something around the method, whichever kind of call it is."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc

Unary = Callable[..., Awaitable[Any]]
Stream = Callable[..., AsyncGenerator[Any, None]]


@dataclass(frozen=True, slots=True)
class Refused:
    """Stands for a request that cannot be had, so that everybody sees the call; ErrorInterceptor raises the error."""

    error: Exception


def wrapped(
    handler: grpc.RpcMethodHandler,
    unary: Callable[[Unary], Unary],
    stream: Callable[[Stream], Stream],
    reads: bool = True,
) -> grpc.RpcMethodHandler:
    """`unary` around a method that answers once, `stream` around one that answers with a stream.

    Without `reads` nothing of the request is wanted: it is neither read nor parsed.
    """
    coders = {
        "request_deserializer": handler.request_deserializer if reads else None,
        "response_serializer": handler.response_serializer,
    }
    if handler.unary_unary:
        return grpc.unary_unary_rpc_method_handler(unary(handler.unary_unary), **coders)
    if handler.stream_stream:
        return grpc.stream_stream_rpc_method_handler(stream(handler.stream_stream), **coders)
    return grpc.unary_stream_rpc_method_handler(stream(handler.unary_stream), **coders)
