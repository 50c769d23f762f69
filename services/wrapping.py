"""Wraps any kind of gRPC handler."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc

OURS = ("/tandem.v1.", "/vllm.grpc.engine.")
"""How the methods of services begin whose errors, calls and limits are ours to handle."""

Unary = Callable[..., Awaitable[Any]]
Stream = Callable[..., AsyncGenerator[Any, None]]


@dataclass(frozen=True, slots=True)
class Refused:
    """Takes the place of a refused request, so that all interceptors see the call; ErrorInterceptor raises `error`."""

    error: Exception


def wrapped(
    handler: grpc.RpcMethodHandler,
    unary: Callable[[Unary], Unary],
    stream: Callable[[Stream], Stream],
    **replaced: Callable[[Any], Any] | None,
) -> grpc.RpcMethodHandler:
    """Applies `unary` to a method with a single reply, `stream` to one with a stream of replies.

    `replaced`: a new request_deserializer (None: the request is neither read nor parsed) or response_serializer.
    """
    coders: dict[str, Any] = {
        "request_deserializer": handler.request_deserializer,
        "response_serializer": handler.response_serializer,
    } | replaced
    if handler.unary_unary:
        return grpc.unary_unary_rpc_method_handler(unary(handler.unary_unary), **coders)
    if handler.stream_stream:
        return grpc.stream_stream_rpc_method_handler(stream(handler.stream_stream), **coders)
    return grpc.unary_stream_rpc_method_handler(stream(handler.unary_stream), **coders)
