"""Asks another engine for whole answers, which the target here settles."""

from __future__ import annotations

import asyncio
import time

from tandem.clients.messages import check_text
from tandem.clients.openai_client import UNKNOWN, OpenAIClient, server_url
from tandem.rpc.credentials import Credentials
from tandem.speculation.errors import InvalidField, TandemError
from tandem.speculation.types import Chunk, GenerationRequest

SILENCE_SECONDS = 120.0  # between bytes of an answer
REST_SECONDS = 2.0  # in which an engine that did not answer is not asked again
CHARACTERS = 64  # of an answer, per token asked for


class OtherEngine:
    """Retries requests for `patience` seconds while the engine is down; later, or answered wrongly, they fail."""

    def __init__(self, field: str, address: str, credentials: Credentials, patience: float = 0.0) -> None:
        """`address`: openai=URL. Raises ValueError."""
        kind, _, url = address.partition("=")
        if kind != "openai":
            raise InvalidField(field, f"{address!r} is not openai=URL")
        server_url(url, field)
        self._client, self._patience = OpenAIClient.connect(url, credentials), patience
        self._down, self._next = 0.0, 0.0  # since when, and when it is asked again
        self._why = TandemError("UNAVAILABLE", "it was not asked yet")

    async def answer(self, request: GenerationRequest) -> tuple[tuple[int, ...], str]:
        """Returns an answer's token ids, empty if it sends none, and its text. Raises TandemError."""
        while True:
            try:
                if time.monotonic() < self._next:
                    raise self._why
                found, self._down = await self._whole(request), 0.0
                return found
            except TandemError as error:
                now = time.monotonic()
                if error is not self._why:
                    self._why, self._next, self._down = error, now + REST_SECONDS, self._down or now
                if error.code != "UNAVAILABLE" or now - self._down >= self._patience:
                    raise
            await asyncio.sleep(REST_SECONDS)

    async def _whole(self, request: GenerationRequest) -> tuple[tuple[int, ...], str]:
        ids, text, most = list[int](), "", request.max_new_tokens or 1
        async for event in self._client.generate(request, SILENCE_SECONDS):
            if isinstance(event, Chunk):
                ids += event.token_ids
                text += event.text
                if len(text) > CHARACTERS * most or (len(ids) > most and UNKNOWN not in ids):
                    raise InvalidField("engine", f"its answer is longer than the {most} tokens asked for")
        check_text("engine", text)
        return (() if UNKNOWN in ids else tuple(ids)), text
