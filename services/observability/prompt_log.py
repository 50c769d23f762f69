"""Logs complete requests and replies, for --log_prompts. Nothing else logs the content of calls."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf import text_format
from google.protobuf.message import Message

from tandem.services.security.identity import caller
from tandem.services.wrapping import OURS, Stream, Unary, wrapped

log = logging.getLogger("tandem.prompts")


class PromptLogInterceptor(grpc.aio.ServerInterceptor):
    """Comes last, so that it sees the request that the service handles."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler, method = await continuation(handler_call_details), handler_call_details.method
        if handler is None or not method.startswith(OURS):
            return handler
        name = method.rpartition("/")[2]

        def unary(answer: Unary) -> Unary:
            async def logged(request: Any, context: grpc.aio.ServicerContext) -> Any:
                _log(name, "asked", request)
                reply = await answer(request, context)
                _log(name, "answered", reply)
                return reply

            return logged

        def stream(answer: Stream) -> Stream:
            async def logged(asked: Any, context: grpc.aio.ServicerContext) -> AsyncGenerator[Any, None]:
                async with contextlib.aclosing(answer(_logged(name, asked), context)) as replies:
                    async for reply in replies:
                        _log(name, "answered", reply)
                        yield reply

            return logged

        return wrapped(handler, unary, stream)


def _logged(name: str, asked: Any) -> Any:
    """Logs a request, or each request of a stream as it is read, and returns it."""
    if not isinstance(asked, Message):
        return _each(name, asked)
    _log(name, "asked", asked)
    return asked


async def _each(name: str, requests: AsyncIterator[Any]) -> AsyncGenerator[Any, None]:
    async for request in requests:
        _log(name, "asked", request)
        yield request


def _log(name: str, what: str, message: Message) -> None:
    text = text_format.MessageToString(message, as_one_line=True, as_utf8=True)
    log.info("%s of %s %s: %s", name, caller() or "anonymous", what, text)
