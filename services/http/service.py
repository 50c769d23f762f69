"""Serves OpenAI's and vLLM's HTTP API."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from google.protobuf.wrappers_pb2 import StringValue

from tandem.rpc.request_context import Request, begin, current_span, set_prefix_scope
from tandem.services.errors import Interrupted, NotAccepting, NotOffered, NotRead
from tandem.services.generation import GenerateMethod, Generations
from tandem.services.http import fields
from tandem.services.http.answers import Answer, models
from tandem.services.http.errors import HttpError
from tandem.services.http.exchange import Exchange
from tandem.services.http.requests import PROMPTS, ParsedRequest, RequestReader, own_name
from tandem.services.http.values import read_json
from tandem.services.layers import Call
from tandem.services.observability.setup import version
from tandem.services.security.call_limits import MessageTimeout, WaitLimit
from tandem.services.security.identity import caller
from tandem.speculation.types import (
    Chunk,
    GenerationEnd,
    GenerationRequest,
    InvalidField,
    TooLong,
)

LARGE_BODY = 32 * 1024  # bytes; larger bodies are parsed in a thread
Events = AsyncGenerator[tuple[int, Chunk | GenerationEnd], None]
Metrics = Callable[[str], Awaitable[tuple[bytes, str]]]
"""Returns the metrics and their content type for an Accept header."""


class HttpService:
    """`adapters()`: the adapters loaded now. `most`: bytes of a body. `metrics` None: not installed."""

    def __init__(
        self,
        generate: GenerateMethod,
        adapters: Callable[[], Mapping[str, str]],
        most: int,
        metrics: Metrics | None = None,
    ) -> None:
        self._generate, self._metrics, self._most, self._started = generate, metrics, most, int(time.time())
        self._reader = RequestReader(generate.generator, generate.limits, adapters)
        self._works: set[Generations] = set()

    @property
    def model(self) -> str:
        return self._reader.model

    def cut(self) -> None:
        for work in list(self._works):
            work.abort()

    async def chat(self, call: Call, exchange: Exchange) -> None:
        await self._generated("chat", call, exchange)

    async def completions(self, call: Call, exchange: Exchange) -> None:
        await self._generated("completions", call, exchange)

    async def _generated(self, of: str, call: Call, exchange: Exchange) -> None:
        given = await self._read(of, call, exchange)
        try:
            request = await (self._reader.chat(given) if of == "chat" else self._reader.completion(given))
            self._begin(call, exchange, request)
            await self._answered(call, exchange, request)
        except InvalidField as error:
            raise own_name(error, of, given) from None
        except Interrupted as error:
            cause = own_name(error.cause, of, given) if isinstance(error.cause, InvalidField) else error.cause
            raise Interrupted(cause, error.produced) from None
        except TooLong as error:
            message = str(error).replace("max_new_tokens", "max_tokens")
            param = "max_tokens" if message != str(error) else PROMPTS[of]
            raise HttpError("SEQUENCE_TOO_LONG", message, param) from None

    async def _read(self, of: str, call: Call, exchange: Exchange) -> dict[str, Any]:
        data = await exchange.body(self._most, self._generate.limits.message_seconds)
        call.received(StringValue(value=data.decode(errors="replace")), len(data))
        if len(data) <= LARGE_BODY:
            return fields.read(of, read_json(data))
        return await self._generate.generator.encoding.run(lambda: fields.read(of, read_json(data)))

    def _begin(self, call: Call, exchange: Exchange, request: ParsedRequest) -> None:
        begin(Request(call.request_id, current_span(), request.requests[0].adapter))
        if "cache_salt" in request.given:
            set_prefix_scope(caller(), request.given["cache_salt"])

    async def _answered(self, call: Call, exchange: Exchange, request: ParsedRequest) -> None:
        streams, info = request.says("stream"), self._generate.generator.info
        try:
            with WaitLimit(self._generate.limits.unread_seconds) as waiting:
                async with _unless_gone(exchange, streams):
                    answer = Answer(request, self._reader.tokenizer, info, call.request_id)
                    async with contextlib.aclosing(self._events(request.requests)) as events:
                        async for choice, event in events:
                            call.replied(self._generate.reply(event))
                            if parts := answer.parts(choice, event):
                                call.sent(await waiting.until(exchange.events(parts)))
                if not answer.complete:
                    raise NotAccepting("the server ended before the answer was complete")
                if not streams:
                    call.sent(await waiting.until(exchange.answer(200, answer.whole())))
                    return
                if last := answer.last():
                    call.sent(await waiting.until(exchange.events(last)))
                await waiting.until(exchange.end())
        except MessageTimeout:
            exchange.abandon()
            raise NotRead("the answer was not read in time") from None

    async def _events(self, requests: Sequence[GenerationRequest]) -> Events:
        work = Generations(self._generate, requests, None)
        self._works.add(work)
        try:
            async with contextlib.aclosing(work.events()) as events:
                async for event in events:
                    yield event
        finally:
            self._works.discard(work)

    async def models(self, call: Call, exchange: Exchange, name: str | None = None) -> None:
        found = models(self.model, self._reader.adapters(), self._generate.generator.info, self._started)
        if name is not None and name not in found:
            raise HttpError("MODEL_NOT_FOUND", f"model: there is no {name[:128]!r} here")
        await exchange.answer(200, found[name] if name else {"object": "list", "data": list(found.values())})

    async def version(self, call: Call, exchange: Exchange) -> None:
        await exchange.answer(200, {"version": version()})

    async def receipt_keys(self, call: Call, exchange: Exchange) -> None:
        receipts = self._generate.receipts
        await exchange.answer(200, receipts.keys.json if receipts else {"keys": []})

    async def metrics(self, call: Call, exchange: Exchange) -> None:
        if self._metrics is None:
            raise NotOffered("this server lacks prometheus-client, of tandem-speculative[metrics]")
        accept = next(iter(call.given("accept")), "")
        page, kind = await self._metrics(accept)
        await exchange.page(200, page, ((b"content-type", kind.encode()),))


@contextlib.asynccontextmanager
async def _unless_gone(exchange: Exchange, streams: bool) -> AsyncIterator[None]:
    """Cancels this task on disconnect while the block runs; keeps a stream alive."""
    task = asyncio.current_task()
    watch = asyncio.create_task(exchange.wait_for_disconnect(), name="client")
    keeping = asyncio.create_task(exchange.keep_alive(), name="comments") if streams else watch
    watch.add_done_callback(lambda its: None if its.cancelled() or task is None else task.cancel())
    try:
        yield
    finally:
        watch.cancel()
        keeping.cancel()
