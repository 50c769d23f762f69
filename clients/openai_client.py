"""A client of an OpenAI server with GenerationClient's interface.

Without token ids (`return_token_ids`) each piece of text counts as one token; the rest of the usage comes last.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from collections.abc import AsyncGenerator, Iterator
from typing import Any
from urllib.parse import SplitResult, urlsplit

from tandem.rpc.credentials import Credentials
from tandem.speculation.errors import TandemError
from tandem.speculation.types import Chunk, FinishReason, GenerationEnd, GenerationRequest, ModelInfo, SpeculationStats

LONGEST_LINE, MOST_BYTES = 1 << 22, 1 << 26  # bytes of a line and of an answer
MOST_STOPS = 4  # strings that OpenAI takes
UNKNOWN = -1  # a token without an id


def server_url(value: str, field: str = "connect") -> SplitResult:
    """Parses http://host[:port][/v1]. Raises ValueError."""
    url = urlsplit(value.rstrip("/").removesuffix("/v1"))
    if url.scheme not in ("http", "https") or not url.hostname or url.path or url.query:
        raise ValueError(f"{field}: {value!r} is not http://HOST:PORT, as an OpenAI server has it")
    _ = url.port  # raises ValueError
    return url


class OpenAIClient:
    """Opens a connection per request, which ends with it."""

    def __init__(self, address: str, token: str | None = None) -> None:
        self._address, self._url, self._token = address, server_url(address), token
        self._model: str | None = None
        self.bytes_up = self.bytes_down = 0

    @classmethod
    def connect(cls, address: str, credentials: Credentials) -> OpenAIClient:
        """Shows the token to servers on this machine or with TLS, to others if `insecure`."""
        url = server_url(address)
        hidden = url.scheme == "https" or url.hostname in ("localhost", "127.0.0.1", "::1")
        token = credentials.token() if hidden or credentials.insecure else None
        return cls(address, token() if token else None)

    async def __aenter__(self) -> OpenAIClient:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    def sharing(self) -> OpenAIClient:
        return OpenAIClient(self._address, self._token)

    async def model_info(self, timeout: float = 10.0, wait: bool = True) -> ModelInfo:
        """Returns the first model's name and length. Raises TandemError."""
        found = [line async for line in self._lines("GET", "/v1/models", None, timeout)]
        try:
            model = json.loads("".join(found))["data"][0]
            self._model, length = str(model["id"]), int(model.get("max_model_len") or 0)
        except (*_WRONG, LookupError) as error:
            raise TandemError("UNAVAILABLE", f"/v1/models is not what OpenAI servers answer: {error}") from None
        return ModelInfo(self._model, "", "", 0, length, 0, 0, "", "", "openai")

    async def generate(
        self, request: GenerationRequest, timeout: float | None = None, **unused: Any
    ) -> AsyncGenerator[Chunk | GenerationEnd, None]:
        """Yields chunks, then the end. Raises TandemError."""
        if self._model is None:
            await self.model_info()
        path, body = _body(request, str(self._model))
        tokens, has_ids, finish, usage = 0, False, FinishReason.LENGTH, dict[str, Any]()
        async for line in self._lines("POST", path, body, timeout):
            if not line.startswith("data:"):
                continue
            if (event := line[5:].strip()) == "[DONE]":
                break
            text, ids, reason, usage = _parsed(event, usage)
            finish = FinishReason.END_OF_SEQUENCE if reason == "stop" else finish
            has_ids = has_ids or bool(ids)
            ids = (UNKNOWN,) if text and not has_ids else ids
            tokens += len(ids)
            if ids or text:
                yield Chunk(ids, text)
        missing = 0 if has_ids else max(0, _count(usage, "completion_tokens", tokens) - tokens)
        if missing:
            yield Chunk((UNKNOWN,) * missing)
        details = usage.get("completion_tokens_details")
        details = details if isinstance(details, dict) else {}
        accepted, rejected = (_count(details, f"{each}_prediction_tokens", 0) for each in ("accepted", "rejected"))
        stats = SpeculationStats(accepted=accepted, drafted=accepted + rejected)
        yield GenerationEnd(finish, _count(usage, "prompt_tokens", 0), tokens + missing, stats)

    async def _lines(
        self, method: str, path: str, body: dict[str, Any] | None, timeout: float | None
    ) -> AsyncGenerator[str, None]:
        """Yields the lines of an answer, read in a thread. Raises TandemError."""
        import asyncio  # here: a comparison's --help reads this file

        loop, lines = asyncio.get_running_loop(), asyncio.Queue[str | Exception | None]()
        connection = (http.client.HTTPSConnection if self._url.scheme == "https" else http.client.HTTPConnection)(
            str(self._url.hostname), self._url.port, timeout=timeout
        )
        payload = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {self._token}"} if self._token else {}
        )

        def put(one: str | Exception | None) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop was closed before the answer ended
                loop.call_soon_threadsafe(lines.put_nowait, one)

        def read() -> None:
            try:
                connection.request(method, path, payload, headers)
                with connection.getresponse() as response:
                    for line in _read(response):
                        put(line)
                put(None)
            except Exception as error:  # the caller raises it
                put(error)

        self.bytes_up += len(payload or b"")
        threading.Thread(target=read, name="read an answer", daemon=True).start()
        try:
            while (line := await lines.get()) is not None:
                if isinstance(line, TandemError):
                    raise line
                if isinstance(line, Exception):
                    raise TandemError("UNAVAILABLE", f"{type(line).__name__}: {line}")
                self.bytes_down += len(line)
                yield line
        finally:
            connection.close()


_WRONG = (ValueError, TypeError, AttributeError, OverflowError, RecursionError)  # of JSON of another shape


def _read(response: http.client.HTTPResponse) -> Iterator[str]:
    if response.status != 200:
        why = response.read(LONGEST_LINE).decode(errors="replace")
        code = "UNAUTHENTICATED" if response.status in (401, 403) else "INVALID_ARGUMENT"
        raise TandemError(code if response.status < 500 else "UNAVAILABLE", f"HTTP {response.status}: {why[:300]}")
    read = 0
    while line := response.readline(LONGEST_LINE):
        read += len(line)
        if read > MOST_BYTES:
            raise TandemError("OUT_OF_RANGE", f"the answer has more than {MOST_BYTES} bytes")
        yield line.decode(errors="replace").strip()


def _body(request: GenerationRequest, model: str) -> tuple[str, dict[str, Any]]:
    """Returns path and body, without fields at their defaults: servers refuse unknown fields."""
    sampling = request.sampling
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": request.max_new_tokens,
        "temperature": sampling.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    if not sampling.greedy:
        body["seed"] = sampling.seed
    body |= {"top_p": sampling.top_p} if sampling.top_p < 1 else {}
    body |= {"top_k": sampling.top_k} if sampling.top_k > 0 else {}
    body |= {"min_p": sampling.min_p} if sampling.min_p > 0 else {}
    if request.stop_strings:
        body["stop"] = list(request.stop_strings[:MOST_STOPS])
    body |= {"ignore_eos": True} if request.ignore_end_of_sequence else {}
    if request.chat and request.text is not None:
        return "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": request.text}]}
    prompt = request.text if request.token_ids is None else list(request.token_ids)
    return "/v1/completions", {**body, "prompt": prompt}


def _parsed(event: str, usage: dict[str, Any]) -> tuple[str, tuple[int, ...], Any, dict[str, Any]]:
    """Returns an event's text, token ids, finish reason, and the newest usage. Raises TandemError."""
    try:
        found = json.loads(event)
        if found.get("error"):
            raise TandemError("UNAVAILABLE", f"{found['error']}"[:300])
        choice: dict[str, Any] = next(iter(found.get("choices") or ()), {})
        text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
        ids = tuple(int(one) for one in choice.get("token_ids") or ())
        if not isinstance(text, str):
            raise TypeError("a text is no string")
        return text, ids, choice.get("finish_reason"), found.get("usage") or usage
    except _WRONG as error:
        raise TandemError("FAILED_PRECONDITION", f"an event is not what OpenAI servers send: {error}") from None


def _count(of: dict[str, Any], name: str, otherwise: int) -> int:
    value = of.get(name)
    return value if isinstance(value, int) and 0 <= value < 2**31 else otherwise
