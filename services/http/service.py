"""Serves OpenAI's and vLLM's HTTP API."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from google.protobuf.wrappers_pb2 import StringValue

import tandem
from tandem.rpc.request_context import RequestContext, begin, current_span, set_prefix_scope
from tandem.services.calls import Call
from tandem.services.generation import GenerateMethod, Generations
from tandem.services.http import fields
from tandem.services.http.answers import HttpAnswer, models
from tandem.services.http.exchange import Exchange
from tandem.services.http.refusals import HttpError
from tandem.services.http.requests import ParsedRequest, RequestReader, own_names
from tandem.services.http.values import read_json
from tandem.services.security.call_limits import MessageTimeout, within
from tandem.services.security.callers import caller
from tandem.services.statuses import NotAccepting, NotOffered, NotRead

LARGE_BODY = 32 * 1024  # bytes; larger bodies are parsed in a thread
Metrics = Callable[[str], Awaitable[tuple[bytes, str]]]  # page and content type for an Accept header


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
        exchange.names = own_names(of, given)
        request = await (self._reader.chat(given) if of == "chat" else self._reader.completion(given))
        begin(RequestContext(call.request_id, current_span(), request.requests[0].adapter))
        if "cache_salt" in given:
            set_prefix_scope(caller(), given["cache_salt"])
        await self._answered(call, exchange, request)

    async def _read(self, of: str, call: Call, exchange: Exchange) -> dict[str, Any]:
        data = await exchange.body(self._most, self._generate.limits.message_seconds)
        call.received(StringValue(value=data.decode(errors="replace")), len(data))
        if len(data) <= LARGE_BODY:
            return fields.read(of, read_json(data))
        return await self._generate.generator.encoding.run(lambda: fields.read(of, read_json(data)))

    async def _answered(self, call: Call, exchange: Exchange, request: ParsedRequest) -> None:
        seconds = self._generate.limits.unread_seconds
        answer = HttpAnswer(request, self._reader.tokenizer, self._generate.generator.info, call.request_id)
        work = Generations(self._generate, request.requests, None)

        async def send(sending: Awaitable[int]) -> None:
            call.sent(await within(seconds, sending))

        self._works.add(work)
        try:
            async with _unless_gone(exchange, request.streams), contextlib.aclosing(work.events()) as events:
                async for choice, event in events:
                    call.replied(self._generate.reply(event))
                    if parts := answer.parts(choice, event):
                        await send(exchange.events(parts))
            if not answer.complete:
                raise NotAccepting("the server ended before the answer was complete")
            if not request.streams:
                await send(exchange.answer(200, answer.whole()))
                return
            if last := answer.last():
                await send(exchange.events(last))
            await within(seconds, exchange.end())
        except MessageTimeout:
            exchange.abandon()
            raise NotRead("the answer was not read in time") from None
        finally:
            self._works.discard(work)

    async def models(self, call: Call, exchange: Exchange, name: str | None = None) -> None:
        found = models(self.model, self._reader.adapters(), self._generate.generator.info, self._started)
        if name is not None and name not in found:
            raise HttpError("MODEL_NOT_FOUND", f"model: there is no {name[:128]!r} here")
        await exchange.answer(200, found[name] if name else {"object": "list", "data": list(found.values())})

    async def version(self, call: Call, exchange: Exchange) -> None:
        await exchange.answer(200, {"version": tandem.__version__})

    async def receipt_keys(self, call: Call, exchange: Exchange) -> None:
        receipts = self._generate.receipts
        await exchange.answer(200, receipts.keys.json if receipts else {"keys": []})

    async def metrics(self, call: Call, exchange: Exchange) -> None:
        if self._metrics is None:
            raise NotOffered("this server lacks prometheus-client, of tandem-speculative[metrics]")
        accept = next(iter(call.given("accept")), "")
        page, kind = await self._metrics(accept)
        await exchange.page(200, page, (("content-type", kind),))


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
