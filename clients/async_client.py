"""AsyncClient: requests continuations, with failover between servers."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING

from tandem.clients.background_loop import closed_error
from tandem.clients.completion import (
    Completion,
    Events,
    Prompt,
    check_connecting,
    chunks_of,
    completion_of,
    request_of,
    with_options,
)
from tandem.rpc.channel import check_process, forked
from tandem.rpc.credentials import Credentials
from tandem.rpc.endpoint_pool import EndpointPool, disagreement, parse_addresses
from tandem.rpc.first_contact import ANSWER_SECONDS, Ask, explained, first_of, service_at
from tandem.rpc.generation_client import GenerationClient
from tandem.rpc.received_errors import TandemError
from tandem.speculation.errors import SILENT, Outcome
from tandem.speculation.request import RequestOptions
from tandem.speculation.retry import RetryBudget
from tandem.speculation.types import (
    Chunk,
    GenerationEnd,
    GenerationRequest,
    ModelInfo,
    Rule,
    SamplingParams,
    SpeculationStats,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack  # which Python has from 3.11 on


class AsyncClient:
    """Requests continuations from Tandem servers, many at once. Raises TandemError.

    `endpoints`: "HOST:PORT", or several (commas or a list) of one model: if one fails, the next continues its output.
    Full or lost servers are retried for `retry_seconds`; `wait_seconds`: for a first server to listen.
    `service`: "TargetVerifier", "FusedSpeculativeServer" or "DraftWorker"; default: any.
    """

    def __init__(
        self,
        endpoints: str | Sequence[str],
        *,
        service: str | None = None,
        credentials: Credentials | None = None,
        retry_seconds: float = 60.0,
        wait_seconds: float = 0.0,
    ) -> None:
        given = check_connecting(endpoints, service, credentials, retry_seconds, wait_seconds)
        self._pool = EndpointPool(parse_addresses(given, "endpoints"))
        self._service, self._credentials = service or "", credentials or Credentials()
        self._credentials.check(given)
        self._retry_seconds, self._wait_seconds = retry_seconds, wait_seconds
        self._clients: dict[str, GenerationClient] = {}
        self._checked: set[str] = set()  # addresses whose model is known to be the expected one
        self._expected: ModelInfo | None = None
        self._closed, self.service = False, self._service  # the service that answered
        self.last_statistics: SpeculationStats | None = None  # of the latest completed request

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connections; running requests end with CANCELLED."""
        self._closed = True
        clients, self._clients = [] if forked() else list(self._clients.values()), {}
        await asyncio.gather(*(client.close() for client in clients))

    async def model_info(self, timeout: float = ANSWER_SECONDS) -> ModelInfo:
        """Returns the first answering server's model; `timeout`: seconds each. Raises TandemError."""
        return (await self._first(timeout, self._wait_seconds))[1]

    async def _first(self, timeout: float, wait_seconds: float) -> tuple[str, ModelInfo]:
        def asking(address: str) -> Ask[ModelInfo]:
            async def ask(seconds: float) -> ModelInfo:
                client = await self._client(address, seconds)
                return await client.model_info(seconds, wait=False)

            return ask

        asks = {address: asking(address) for address in self._pool.turns(self._pool.current)}
        return await first_of(asks, self._credentials, timeout, wait_seconds, self._service)

    @with_options
    async def generate(
        self,
        prompt: Prompt | None = None,
        sampling: SamplingParams | None = None,
        *,
        stop: str | Sequence[str] = (),
        timeout: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> Completion:
        """Returns the whole continuation."""
        return await completion_of(self.events(request_of(prompt, sampling, stop, timeout, **options), timeout))

    @with_options
    def stream(
        self,
        prompt: Prompt | None = None,
        sampling: SamplingParams | None = None,
        *,
        stop: str | Sequence[str] = (),
        timeout: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[Chunk, None]:
        """Yields chunks as they are committed; closing cancels the request."""
        request = request_of(prompt, sampling, stop, timeout, **options)
        return chunks_of(self.events(request, timeout))

    async def events(self, request: GenerationRequest, timeout: float | None = None) -> Events:
        """Yields a request's chunks, then its end. Raises TandemError."""
        deadline = None if timeout is None else time.monotonic() + timeout
        budget = RetryBudget(self._retry_seconds, deadline, admission=self._retry_seconds)
        received, address = Repetition(), self._pool.current
        while True:
            try:
                most = math.inf if deadline is None else _left(deadline)
                if self._expected is None:
                    address, info = await self._first(min(ANSWER_SECONDS, most), min(self._wait_seconds, most))
                    self._expected = self._expected or info
                    if self._expected is info:
                        self._checked.add(address)
                client = await self._ready(address, self._expected, min(ANSWER_SECONDS, most))
                left = None if deadline is None else _left(deadline)
                async with contextlib.aclosing(client.generate(request, left)) as events:
                    async for event in events:
                        budget.progress()
                        if isinstance(event, GenerationEnd):
                            self._pool.answered(address)
                            self.last_statistics = event.stats
                            yield event
                        elif (fresh := received.fresh(event)) is not None:
                            yield fresh
                return
            except asyncio.CancelledError:
                if self._closed:  # closing a channel cancels its calls
                    raise closed_error(tuple(received.tokens)) from None
                raise
            except TandemError as error:
                error.produced = tuple(received.tokens)
                if self._closed or not _repeatable(request, received):
                    raise
                pause, address = self._after(address, error, budget)
            received.restart()
            await asyncio.sleep(pause)

    def _after(self, address: str, error: TandemError, budget: RetryBudget) -> tuple[float, str]:
        # Raises `error` to give up.
        if error.outcome is Outcome.FULL and error.retry_seconds is not None:
            full = budget.full(error.retry_seconds)
            if full is None:
                raise error
            return full, self._pool.after(address)
        self._checked.discard(address)  # the next server there may be another one
        if error.outcome is Outcome.UNFIT and error.reason == _OTHER_MODEL:
            if not self._pool.refuse(address, error.message):
                raise error
            return 0.0, self._pool.current
        if error.outcome not in SILENT or budget.over or self._expected is None:
            raise error
        self._pool.failed(address, str(error))
        pause = budget.wait()
        if pause is None:
            raise error
        return pause, self._pool.current

    async def _ready(self, address: str, expected: ModelInfo, seconds: float) -> GenerationClient:
        try:
            client = await self._client(address, seconds)
            info = expected if address in self._checked else await client.model_info(seconds, wait=False)
        except TandemError as error:
            raise explained(error, address, self._credentials, self._service) from None
        if (other := disagreement(expected, info)) is not None:
            raise TandemError("FAILED_PRECONDITION", f"the server at {address}: {other}", reason=_OTHER_MODEL)
        self._checked.add(address)
        return client

    async def _client(self, address: str, seconds: float) -> GenerationClient:
        if self._closed:
            raise closed_error()
        check_process()
        if address not in self._clients:
            self.service = self._service or await service_at(address, self._credentials, seconds)
            if self._closed:
                raise closed_error()
            if address not in self._clients:  # another request may have connected meanwhile
                self._clients[address] = GenerationClient.connect(address, self.service, self._credentials)
        return self._clients[address]


_OTHER_MODEL = "OTHER_MODEL"
_LONGEST_SECONDS = 1e8


def _left(end: float) -> float:
    # gRPC takes no timeout of 0, and one of centuries as over.
    return min(max(0.001, end - time.monotonic()), _LONGEST_SECONDS)


def _repeatable(request: GenerationRequest, received: Repetition) -> bool:
    # Under rejection sampling depends on the drafts.
    greedy = request.sampling.greedy and "temperature" not in request.unset_sampling
    return request.rule is Rule.AGREEMENT or greedy or not received.tokens


class Repetition:
    def __init__(self) -> None:
        self.tokens: list[int] = []  # yielded
        self._text = ""
        self._repeated_tokens = 0
        self._repeated_text = ""

    def restart(self) -> None:
        self._repeated_tokens, self._repeated_text = 0, ""

    def fresh(self, chunk: Chunk) -> Chunk | None:
        """Returns `chunk` without yielded tokens, if any are left. Raises TandemError if they differ."""
        start, end = self._repeated_tokens, self._repeated_tokens + len(chunk.token_ids)
        known = self.tokens[start:end]
        if list(chunk.token_ids[: len(known)]) != known:
            raise TandemError("DATA_LOSS", "the repeated request produced other tokens: the servers run other models")
        self._repeated_tokens, self._repeated_text = end, self._repeated_text + chunk.text
        tokens = chunk.token_ids[len(known) :]
        text = self._repeated_text[len(self._text) :]
        self.tokens += tokens
        self._text += text
        new = len(known)
        return Chunk(tokens, text, chunk.margins[new:], chunk.logprobs[new:]) if tokens or text else None
