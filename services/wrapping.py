"""A method's handler with something around the method, whichever kind of call it is."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import grpc

Unary = Callable[..., Awaitable[Any]]
Stream = Callable[..., AsyncGenerator[Any, None]]


def wrapped(
    handler: grpc.RpcMethodHandler, unary: Callable[[Unary], Unary], stream: Callable[[Stream], Stream]
) -> grpc.RpcMethodHandler:
    """`unary` around a method that answers once, `stream` around one that answers with a stream."""
    coders = {
        "request_deserializer": handler.request_deserializer,
        "response_serializer": handler.response_serializer,
    }
    if handler.unary_unary:
        return grpc.unary_unary_rpc_method_handler(unary(handler.unary_unary), **coders)
    if handler.stream_stream:
        return grpc.stream_stream_rpc_method_handler(stream(handler.stream_stream), **coders)
    return grpc.unary_stream_rpc_method_handler(stream(handler.unary_stream), **coders)
