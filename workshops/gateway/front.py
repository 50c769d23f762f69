"""Stands before smg: refuses by name what smg would drop, and passes everything else on to it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import h11

from tandem.services.errors import to_status
from tandem.services.http import fields
from tandem.services.http.body import read_json
from tandem.services.http.errors import refusal
from tandem.services.http.exchange import Exchange
from tandem.services.http.fields import CHAT, COMPLETIONS, FIELDS, Kind
from tandem.speculation.types import InvalidField

MOST_BYTES = 4 * 2**20
BODY_SECONDS = 30.0
PATHS = {"/v1/chat/completions": CHAT[0], "/v1/completions": COMPLETIONS[0]}
OF_SMG = ("regex", "ebnf")
"""Fields that smg has itself, besides those of the table."""
PASSED = frozenset(
    (
        *("model", "messages", "prompt", "n", "max_tokens", "max_completion_tokens", "seed", "stop", "stop_token_ids"),
        *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
        *("ignore_eos", "logprobs", "top_logprobs", "response_format", "tools", "tool_choice", "parallel_tool_calls"),
        *("stream", "stream_options", "echo"),
    )
)
"""Fields that smg 1.13 passes on to its workers, or answers itself."""
SEEDS = 2**31
_NOT_PASSED = "the gateway's router, smg, does not pass it on; a server's own HTTP port serves it"
_FULL = b"concurrency limit reached and queuing is disabled"
"""What smg says when it is full: not true, since its limit has the queue in it."""
_HOP = (b"connection", b"keep-alive", b"transfer-encoding", b"te", b"upgrade", b"expect", b"content-length", b"host")
"""Headers of one connection, which are not passed on."""


def check(of: str, body: Mapping[str, Any]) -> None:
    """Raises InvalidField for what no server takes, and for what smg would not pass on."""
    given = fields.read(of, {name: value for name, value in body.items() if name not in OF_SMG})
    for name in given:
        if FIELDS[name].kind is Kind.SERVED and name not in PASSED:
            raise InvalidField(name, _NOT_PASSED)
    if of in COMPLETIONS and "logprobs" in given:
        raise InvalidField("logprobs", _NOT_PASSED)
    if given.get("stream_options", {}).get("continuous_usage_stats"):
        raise InvalidField("stream_options", f"continuous_usage_stats: {_NOT_PASSED}")
    if not -SEEDS <= given.get("seed", 0) < SEEDS:
        raise InvalidField("seed", f"{given['seed']} has more than smg's 32 bits; a server's own HTTP port takes 64")


class Front:
    """An ASGI application in front of smg, which listens on this machine. `full`: what it says while it is full."""

    def __init__(self, port: int, full: str = "") -> None:
        self._port, self._full = port, full.encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        exchange = Exchange(scope, receive, send)
        try:
            body = b""
            if scope["method"] not in ("GET", "HEAD", "DELETE"):
                body = await exchange.body(MOST_BYTES, BODY_SECONDS)
                if of := PATHS.get(scope["path"]):
                    check(of, read_json(body))
        except asyncio.CancelledError:  # the client has left
            return
        except Exception as error:
            said = refusal(to_status(error))
            headers = [(name.encode(), value.encode()) for name, value in said.headers]
            await exchange.answer(said.status, said.content, headers)
            return
        passing = asyncio.ensure_future(self._pass_on(scope, body, send))
        leaving = asyncio.ensure_future(exchange.gone())
        await asyncio.wait({passing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        for task in (passing, leaving):
            task.cancel()
        await asyncio.gather(passing, leaving, return_exceptions=True)

    async def _pass_on(self, scope: Any, body: bytes, send: Any) -> None:
        """Sends a request to smg, and its answer back as it comes. Leaving early closes smg's connection."""
        begun = events = full = False
        try:
            async with self._connection() as (reader, writer):
                smg = h11.Connection(h11.CLIENT)
                writer.write(_request(scope, body, self._port, smg))
                async for event in _events(reader, smg):
                    if isinstance(event, h11.Response):
                        full = bool(self._full) and event.status_code == 429
                        left_out = _HOP if full else _HOP[:5]  # another text has another length
                        headers = [(name, value) for name, value in event.headers if name not in left_out]
                        begun, events = True, dict(headers).get(b"content-type", b"").startswith(b"text/event-stream")
                        await send({"type": "http.response.start", "status": event.status_code, "headers": headers})
                    elif isinstance(event, h11.Data):
                        data = bytes(event.data).replace(_FULL, self._full) if full else bytes(event.data)
                        await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        except (OSError, h11.RemoteProtocolError):
            if not begun:
                headers = [(b"retry-after", b"1"), (b"content-length", b"0")]
                await send({"type": "http.response.start", "status": 503, "headers": headers})
                await send({"type": "http.response.body", "body": b""})
            elif events:
                said = {"error": {"message": "the gateway is stopping", "type": "server_error", "code": "stopping"}}
                last = b"data: " + json.dumps(said).encode() + b"\n\ndata: [DONE]\n\n"
                await send({"type": "http.response.body", "body": last})
            else:
                scope["tandem"].transport.abort()  # smg has gone: the client sees that the answer is not whole

    @contextlib.asynccontextmanager
    async def _connection(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            yield reader, writer
        finally:
            writer.close()


def _request(scope: Any, body: bytes, port: int, smg: h11.Connection) -> bytes:
    """Returns the bytes of a request to smg, with the headers of the client's own."""
    target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
    headers = [(name, value) for name, value in scope["headers"] if name not in _HOP]
    headers += [(b"host", b"127.0.0.1:%d" % port), (b"connection", b"close"), (b"content-length", b"%d" % len(body))]
    asked = h11.Request(method=scope["method"].encode(), target=target, headers=headers)
    return b"".join(smg.send(part) or b"" for part in (asked, h11.Data(data=body), h11.EndOfMessage()))


async def _events(reader: asyncio.StreamReader, smg: h11.Connection) -> AsyncIterator[h11.Event]:
    """Yields the parts of smg's answer. Raises RemoteProtocolError if it is not whole."""
    while True:
        event = smg.next_event()
        if event is h11.NEED_DATA:
            smg.receive_data(await reader.read(65536))
        elif isinstance(event, h11.EndOfMessage):
            return
        elif isinstance(event, h11.Event):
            yield event
