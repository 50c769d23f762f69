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
from tandem.services.wrapping import Stream, Unary, wrapped

log = logging.getLogger("tandem.prompts")


class PromptLogInterceptor(grpc.aio.ServerInterceptor):
    """Stands last, so that it sees what is really asked."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler, method = await continuation(handler_call_details), handler_call_details.method
        if handler is None or not method.startswith("/tandem.v1."):
            return handler
        name = method.rpartition("/")[2]

        def unary(answer: Unary) -> Unary:
            async def logged(request: Any, context: grpc.aio.ServicerContext) -> Any:
                _say(name, "asked", request)
                reply = await answer(request, context)
                _say(name, "answered", reply)
                return reply

            return logged

        def stream(answer: Stream) -> Stream:
            async def logged(asked: Any, context: grpc.aio.ServicerContext) -> AsyncGenerator[Any, None]:
                async with contextlib.aclosing(answer(_overheard(name, asked), context)) as replies:
                    async for reply in replies:
                        _say(name, "answered", reply)
                        yield reply

            return logged

        return wrapped(handler, unary, stream)


def _overheard(name: str, asked: Any) -> Any:
    """A request, or a stream of them."""
    if not isinstance(asked, Message):
        return _each(name, asked)
    _say(name, "asked", asked)
    return asked


async def _each(name: str, requests: AsyncIterator[Any]) -> AsyncGenerator[Any, None]:
    async for request in requests:
        _say(name, "asked", request)
        yield request


def _say(name: str, what: str, message: Message) -> None:
    text = text_format.MessageToString(message, as_one_line=True, as_utf8=True)
    log.info("%s of %s %s: %s", name, caller() or "anonymous", what, text)
