"""One HTTP request and its answer; to the layers, a gRPC call's context."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import grpc
from google.rpc import status_pb2

from tandem.rpc.request_context import REQUEST_ID
from tandem.services.http.refusals import HttpError, refusal
from tandem.services.security.call_limits import MessageTimeout, within

Json = dict[str, Any]
Headers = Sequence[tuple[str, str]]
DISCARD_SECONDS = 1.0
BEGIN_SECONDS, QUIET_SECONDS = 1.0, 15.0  # seconds until a silent stream begins; between comments
COMMENT = b": \n\n"
_EVENTS = (("content-type", "text/event-stream; charset=utf-8"), ("cache-control", "no-store"))
_JSON = ("content-type", "application/json")


class Exchange:
    """`request_id`: sent in the headers once assigned. `names`: HTTP's names of fields."""

    def __init__(self, scope: Any, receive: Any, send: Any) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self.request_id, self.begun, self.streams = "", False, False
        self.names: Mapping[str, str] = {}
        self._sent = 0.0
        self._unread = self.header("transfer-encoding") is not None or self.header("content-length") not in (None, "0")

    # --- the request ---

    @property
    def metadata(self) -> list[tuple[str, str]]:
        return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in self._scope["headers"]]

    def header(self, name: str) -> str | None:
        return dict(self.metadata).get(name)

    async def body(self, most: int, seconds: float) -> bytes:
        """Returns the body. Raises HttpError."""
        headers = dict(self._scope["headers"])
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if kind != b"application/json":
            raise HttpError("NOT_JSON", "the body's content-type is not application/json")
        if (coding := headers.get(b"content-encoding", b"identity").decode("latin-1").strip().lower()) != "identity":
            raise HttpError("NOT_JSON", f"content-encoding: {coding[:80]!r} is not served: send the JSON as it is")
        if int(headers.get(b"content-length", b"0")) > most:
            raise _too_large(most)
        try:
            return await within(seconds, self._rest(most))
        except MessageTimeout:
            raise HttpError("BODY_LATE", f"the body did not arrive within {seconds:g} s") from None

    async def _rest(self, most: int) -> bytes:
        found = bytearray()
        while self._unread:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise asyncio.CancelledError
            found += message["body"]
            if len(found) > most:
                raise _too_large(most)
            self._unread = message["more_body"]
        return bytes(found)

    async def wait_for_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    # --- the answer ---

    async def answer(self, status: int, content: Json, headers: Headers = ()) -> int:
        return await self.page(status, json.dumps(content, ensure_ascii=False).encode(), (_JSON, *headers))

    async def page(self, status: int, data: bytes, headers: Headers) -> int:
        ends = status >= 400 and self._unread
        closing = [("connection", "close")] if ends else []
        await self._begin(status, (*headers, ("content-length", str(len(data))), *closing))
        await self._send({"type": "http.response.body", "body": data, "more_body": ends})
        if ends:
            with contextlib.suppress(MessageTimeout):
                await within(DISCARD_SECONDS, self._discard())
            await self._send({"type": "http.response.body", "body": b""})
        return len(data)

    async def _discard(self) -> None:
        # Closing at once would lose the answer: read on for a moment.
        while not self.header("expect"):  # such a client sends nothing before the server says 100
            message = await self._receive()
            if message["type"] == "http.disconnect" or not message["more_body"]:
                return

    async def events(self, messages: Sequence[Json]) -> int:
        # ASCII: JSON allows U+0085 and U+2028, at which str.splitlines ends lines.
        events = (f"data: {json.dumps(message, separators=(',', ':'))}\n\n" for message in messages)
        return await self._stream("".join(events).encode())

    async def _stream(self, data: bytes) -> int:
        if not self.begun:
            self.streams = True
            await self._begin(200, _EVENTS)
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self._sent = asyncio.get_running_loop().time()
        return len(data)

    async def keep_alive(self) -> None:
        """Begins a waiting stream, and sends a comment every QUIET_SECONDS of silence."""
        loop = asyncio.get_running_loop()
        self._sent = loop.time()
        while True:
            left = self._sent + (QUIET_SECONDS if self.begun else BEGIN_SECONDS) - loop.time()
            if left > 0:
                await asyncio.sleep(left)
            elif self._scope["tandem"].flow.write_paused:  # so no event of another task is overtaken
                self._sent = loop.time()
            else:
                await self._stream(COMMENT)

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def refuse(self, status: status_pb2.Status) -> None:
        """Sends a failed call's status; in a stream, as its last event."""
        number, content, headers = refusal(status, self.names)
        if not self.begun:
            await self.answer(number, content, headers)
        elif self.streams:
            await self.events([content])
            await self.end()

    def abandon(self) -> None:
        """Closes the connection at once: the client must not take a partial answer for a whole one."""
        self._scope["tandem"].transport.abort()

    async def _begin(self, status: int, headers: Headers) -> None:
        self.begun = True
        if self.request_id:
            headers = (*headers, (REQUEST_ID, self.request_id))
        sent = [(name.encode(), value.encode()) for name, value in headers]
        await self._send({"type": "http.response.start", "status": status, "headers": sent})

    # --- the context of a call ---

    def peer(self) -> str:
        host, port = self._scope.get("client") or ("unix", 0)
        return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"

    def auth_context(self) -> Mapping[str, Sequence[bytes]]:
        shown = self._scope["tandem"].certificate
        return {"x509_pem_cert": [shown]} if shown else {}

    def time_remaining(self) -> float | None:
        return None

    def set_trailing_metadata(self, metadata: Sequence[tuple[str, str]]) -> None:
        """No effect: the request id is a header."""

    async def abort_with_status(self, status: Any) -> NoReturn:
        raise grpc.aio.AbortError(status.details)


def _too_large(most: int) -> HttpError:
    message = f"the body is larger than this server's limit of {most} bytes (max_message_bytes)"
    return HttpError("BODY_TOO_LARGE", message)
