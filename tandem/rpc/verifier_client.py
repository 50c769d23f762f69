"""Channels to the configured TargetVerifiers, which must run the same model."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from tandem.rpc import wire
from tandem.rpc.channel import STUBS, TARGET, open_channel, unary
from tandem.rpc.credentials import Credentials
from tandem.rpc.endpoint_pool import CHECK_SECONDS, EndpointPool, disagreement, parse_addresses
from tandem.rpc.first_contact import ANSWER_SECONDS, first_of, together
from tandem.rpc.generation_client import GenerationClient
from tandem.rpc.received_errors import TandemError, contract
from tandem.speculation.errors import WORTH_REPEATING
from tandem.speculation.retry import RETRY_SECONDS, doubled
from tandem.speculation.types import ModelInfo
from tandem.v1 import target_verifier_pb2 as pb


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds. `admission`: retries of a full server. `stall`: before another verifier takes over."""

    open: float = 120.0
    verify: float = 30.0
    close: float = 2.0
    admission: float = 600.0
    stall: float = 4.0


class VerifierEndpoint:
    """`suspect`: recheck its model. `signs`: receipt key and arithmetic. `max_unread` 0: no run before its session."""

    def __init__(self, address: str, credentials: Credentials | None = None) -> None:
        self.address = address
        self.name = f"the TargetVerifier at {address}"
        self.suspect, self.signs, self.max_unread = True, ("", ""), 0
        self.channel = open_channel(address, credentials)
        self.stub: Any = STUBS[TARGET](self.channel)

    async def info(self, seconds: float) -> ModelInfo:
        reply = await unary(self.stub.GetModelInfo, pb.TargetVerifierGetModelInfoRequest(), timeout=seconds)
        with contract(self.name):
            return self.found(wire.info_from_wire(reply.model))

    def found(self, info: ModelInfo) -> ModelInfo:
        self.signs, self.max_unread = (info.receipt_key, info.arithmetic), info.max_unread_tokens
        return info


class VerifierClient:
    """Channels to HOST:PORT[,HOST:PORT...], all with the first answer's model (`expected`). Raises ValueError."""

    def __init__(
        self,
        addresses: str,
        tokenizer_sha256: str,
        deadlines: Deadlines | None = None,
        retry_seconds: float = RETRY_SECONDS,
        credentials: Credentials | None = None,
    ) -> None:
        self.tokenizer_sha256, self._credentials = tokenizer_sha256, credentials
        if not retry_seconds >= 0:
            raise ValueError(f"reconnect_seconds: {retry_seconds} is below 0")
        self.deadlines, self.retry_seconds = deadlines or Deadlines(), retry_seconds
        self.pool = EndpointPool(parse_addresses(addresses))
        self.endpoints = {address: VerifierEndpoint(address, credentials) for address in self.pool.addresses}
        self.expected: ModelInfo | None = None
        self.closes = SessionCloses()

    @property
    def address(self) -> str:
        return self.pool.current

    @property
    def endpoint(self) -> VerifierEndpoint:
        return self.endpoints[self.pool.current]

    async def model_info(self, wait_seconds: float = 30.0) -> ModelInfo:
        async def ask(endpoint: VerifierEndpoint) -> tuple[VerifierEndpoint, ModelInfo]:
            client = GenerationClient(endpoint.channel, TARGET)
            asks = {endpoint.address: partial(client.model_info, wait=False)}
            about = self._credentials, ANSWER_SECONDS, wait_seconds, TARGET
            return endpoint, (await first_of(asks, *about))[1]

        asking = [asyncio.create_task(ask(endpoint)) for endpoint in self.endpoints.values()]
        try:
            for answer in asyncio.as_completed(asking):
                with contextlib.suppress(TandemError):
                    endpoint, self.expected = await answer
                    endpoint.found(self.expected)
                    endpoint.suspect, self.pool.current = False, endpoint.address
                    return self.expected
        finally:
            for task in asking:
                task.cancel()
            ended = await asyncio.gather(*asking, return_exceptions=True)
        raise together([error for error in ended if isinstance(error, TandemError)])

    def is_only(self, endpoint: VerifierEndpoint) -> bool:
        return self.pool.after(endpoint.address) == endpoint.address

    async def check(self, endpoint: VerifierEndpoint, seconds: float) -> None:
        """Raises TandemError unless sessions can continue there; FAILED_PRECONDITION for another model."""
        if not endpoint.suspect or self.expected is None:
            return
        found = disagreement(self.expected, await endpoint.info(min(seconds, CHECK_SECONDS)))
        if found:
            raise TandemError("FAILED_PRECONDITION", f"{endpoint.name}: {found}")
        endpoint.suspect = False

    async def close(self) -> None:
        await self.closes.settle()
        await asyncio.gather(*(endpoint.channel.close() for endpoint in self.endpoints.values()))


SETTLE_SECONDS = 1.0  # a closing client waits for session closes


class SessionCloses:
    """A client's pending closes, each tried `attempts` times with waits doubling from `first` seconds."""

    def __init__(self, attempts: int = 6, first: float = 0.1) -> None:
        self._attempts, self._first = attempts, first
        self._running: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._running)

    def begin(self, call: Callable[[], Awaitable[object]]) -> asyncio.Future[None]:
        """Starts `call`, which may raise TandemError; the future is done after its first attempt."""
        tried: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._until_answered(call, tried), name="close session")
        self._running.add(task)  # the event loop itself keeps no task alive
        task.add_done_callback(self._running.discard)
        task.add_done_callback(lambda _: _set(tried))
        return tried

    async def _until_answered(self, call: Callable[[], Awaitable[object]], tried: asyncio.Future[None]) -> None:
        for attempt in range(self._attempts):
            try:
                await call()
                return
            except TandemError as error:
                if error.outcome not in WORTH_REPEATING:
                    return
            _set(tried)
            if attempt + 1 < self._attempts:
                await asyncio.sleep(doubled(self._first, math.inf, attempt))

    async def settle(self, seconds: float = SETTLE_SECONDS) -> None:
        running = list(self._running)
        if not running:
            return
        await asyncio.wait(running, timeout=seconds)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def _set(tried: asyncio.Future[None]) -> None:
    if not tried.done():
        tried.set_result(None)
