"""Answers what OpenAI's and vLLM's clients ask, by the generator of our own services."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from google.protobuf.wrappers_pb2 import StringValue

from tandem.rpc.request_context import Request, begin, current_span, set_prefix_scope, valid_id
from tandem.services.errors import Interrupted, NotAccepting, NotOffered, NotRead
from tandem.services.generation import GenerateMethod, Generations
from tandem.services.http import fields, values
from tandem.services.http.answers import Answer, models
from tandem.services.http.body import read_json, unpacked
from tandem.services.http.exchange import Exchange
from tandem.services.http.problems import NoSuchModel
from tandem.services.http.requests import PROMPTS, Asked, Asking, own_name
from tandem.services.http.scoring import nothing, scored
from tandem.services.http.tools import ToolUse
from tandem.services.layers import Call
from tandem.services.observability.setup import version
from tandem.services.security.call_limits import MessageTimeout, WaitLimit
from tandem.services.security.identity import caller
from tandem.speculation.types import GenerationRequest, InvalidField, TooLong

LARGE_BODY = 32 * 1024
"""Bodies of at most so many bytes are read directly, within a few milliseconds."""
Metrics = Callable[[str], tuple[bytes, str]]
"""Returns the page of metrics and its content type, for an Accept header."""


class HttpService:
    """`adapters` returns those that there are now. `metrics` None: prometheus-client is not installed.

    `most`: bytes of a body.
    """

    def __init__(
        self,
        generate: GenerateMethod,
        adapters: Callable[[], Mapping[str, str]],
        most: int,
        metrics: Metrics | None = None,
    ) -> None:
        self._generate, self._metrics, self._most, self._started = generate, metrics, most, int(time.time())
        self._asking = Asking(generate.generator, generate.limits, adapters)
        self._cut = False
        self._works: set[Generations] = set()
        self._scraping = ThreadPoolExecutor(1, "metrics page")

    @property
    def model(self) -> str:
        return self._asking.model

    @property
    def accepting(self) -> bool:
        return self._generate.lifecycle.accepting

    def cut(self) -> None:
        """Ends what still runs, with an error."""
        self._cut = True
        for work in list(self._works):
            work.abort()

    async def chat(self, call: Call, exchange: Exchange) -> None:
        await self._generated("chat", call, exchange)

    async def completions(self, call: Call, exchange: Exchange) -> None:
        await self._generated("completions", call, exchange)

    async def _generated(self, of: str, call: Call, exchange: Exchange) -> None:
        given = await self._read(of, call, exchange)
        try:
            asked = await (self._asking.chat(given) if of == "chat" else self._asking.completion(given))
            self._begin(call, exchange, asked)
            await self._answered(call, exchange, asked)
        except InvalidField as error:
            raise own_name(error, of, given) from None
        except Interrupted as error:
            cause = own_name(error.cause, of, given) if isinstance(error.cause, InvalidField) else error.cause
            raise Interrupted(cause, error.produced) from None
        except NoSuchModel:
            exchange.param = "model"
            raise
        except TooLong as error:
            message = str(error).replace("max_new_tokens", "max_tokens")
            exchange.param = "max_tokens" if message != str(error) else PROMPTS[of]
            raise TooLong(message) from None

    async def _read(self, of: str, call: Call, exchange: Exchange) -> dict[str, Any]:
        """Reads fields; those of a large body in the thread in which callers take turns."""
        data = await self._body(call, exchange)
        if len(data) <= LARGE_BODY:
            return fields.read(of, read_json(data))
        return await self._generate.generator.encoding.run(lambda: fields.read(of, read_json(data)))

    async def _body(self, call: Call, exchange: Exchange) -> bytes:
        data = await exchange.body(self._most, self._generate.limits.message_seconds)
        if exchange.coding != "identity":
            packed = data
            data = await self._generate.generator.encoding.run(lambda: unpacked(packed, self._most))
        call.received(StringValue(value=data.decode(errors="replace")), len(data))
        return data

    def _begin(self, call: Call, exchange: Exchange, asked: Asked) -> None:
        """Makes id, adapter and prefix scope of the request those of this task."""
        if "request_id" in asked.given:
            if not valid_id(asked.given["request_id"]):
                raise InvalidField("request_id", "not 1 to 128 visible ASCII characters")
            call.request_id = exchange.request_id = asked.given["request_id"]
        begin(Request(call.request_id, current_span(), asked.requests[0].adapter))
        if "cache_salt" in asked.given:
            set_prefix_scope(caller(), asked.given["cache_salt"])

    async def _answered(self, call: Call, exchange: Exchange, asked: Asked) -> None:
        generator, streams = self._generate.generator, asked.says("stream")
        answer = Answer(asked, self._asking.tokenizer, generator.info, call.request_id)
        try:
            with WaitLimit(self._generate.limits.unread_seconds) as waiting:
                async with _unless_gone(exchange, streams):
                    if asked.scores_prompts:
                        firsts = asked.requests[:: asked.n]
                        answer.score(await scored(firsts, generator.info.max_speculation_length, self._working))
                    with self._working(asked.requests) as work:
                        made = work.events() if asked.generates else nothing(asked.requests)
                        async with contextlib.aclosing(made) as events:
                            async for choice, event in events:
                                call.replied(self._generate.reply(event))
                                parts = answer.parts(choice, event)
                                if streams and parts:
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

    @contextlib.contextmanager
    def _working(self, requests: Sequence[GenerationRequest]) -> Iterator[Generations]:
        """Generations that `cut` ends."""
        work = Generations(self._generate, requests, None)
        self._works.add(work)
        try:
            yield work
        finally:
            self._works.discard(work)

    async def models(self, call: Call, exchange: Exchange) -> None:
        await exchange.answer(200, {"object": "list", "data": self._models()})

    async def model_named(self, call: Call, exchange: Exchange, name: str) -> None:
        for each in self._models():
            if each["id"] == name:
                await exchange.answer(200, each)
                return
        raise NoSuchModel(f"model: there is no {name[:128]!r} here")

    def _models(self) -> list[dict[str, Any]]:
        return models(self.model, self._asking.adapters(), self._generate.generator.info, self._started)

    async def tokenize(self, call: Call, exchange: Exchange) -> None:
        """Answers vLLM's /tokenize, of a prompt or of messages."""
        body = read_json(await self._body(call, exchange))
        spells = values.boolean("return_token_strs", body.pop("return_token_strs", False))
        if "messages" in body:
            given = fields.read("chat", body)
            chosen = ToolUse(tuple(given.get("tools", ())), "auto" if given.get("tools") else "none")
            tokens = await self._asking.chat_tokens(given, chosen)
        else:
            given = fields.read("completions", body)
            prompt = given.get("prompt")
            if not prompt or len(prompt) > 1 or not isinstance(prompt[0], str):
                raise InvalidField("prompt", "one text, or messages, is needed")
            tokens = await self._asking.tokens(prompt[0], given.get("add_special_tokens", True))
        self._asking.adapter(given.get("model", ""))
        generator = self._generate.generator
        told = {"count": len(tokens), "max_model_len": generator.info.max_sequence_length, "tokens": tokens}
        spelt = [self._asking.tokenizer.text([token]) for token in tokens] if spells else None
        await exchange.answer(200, {**told, "token_strs": spelt})

    async def detokenize(self, call: Call, exchange: Exchange) -> None:
        """Answers vLLM's /detokenize."""
        info = self._generate.generator.info
        token = values.integer(0, info.vocab_size - 1)
        keys = {"model": values.string, "tokens": values.listed(token)}
        given = values.known("body", read_json(await self._body(call, exchange)), keys)
        self._asking.adapter(given.get("model", ""))
        if "tokens" not in given:
            raise InvalidField("tokens", "missing")
        await exchange.answer(200, {"prompt": self._asking.tokenizer.text(given["tokens"])})

    async def version(self, call: Call, exchange: Exchange) -> None:
        await exchange.answer(200, {"version": version()})

    async def receipt_keys(self, call: Call, exchange: Exchange) -> None:
        """Answers with the public keys of this server's receipts; none if it signs none."""
        receipts = self._generate.receipts
        await exchange.answer(200, receipts.keys.json if receipts else {"keys": []})

    async def metrics(self, call: Call, exchange: Exchange) -> None:
        """Answers with the Prometheus metrics, made in a thread of their own."""
        if self._metrics is None:
            raise NotOffered("this server lacks prometheus-client, of tandem-speculative[metrics]")
        accept = next(iter(call.given("accept")), "")
        page, kind = await asyncio.get_running_loop().run_in_executor(self._scraping, self._metrics, accept)
        await exchange.page(200, page, ((b"content-type", kind.encode()),))


@contextlib.asynccontextmanager
async def _unless_gone(exchange: Exchange, streams: bool) -> AsyncIterator[None]:
    """Cancels this task if the client leaves while the block runs, and keeps a stream alive."""
    task = asyncio.current_task()
    watch = asyncio.create_task(exchange.gone(), name="client")
    keeping = asyncio.create_task(exchange.keep_alive(), name="comments") if streams else watch
    watch.add_done_callback(lambda its: None if its.cancelled() or task is None else task.cancel())
    try:
        yield
    finally:
        watch.cancel()
        keeping.cancel()
