"""Channels to the TargetVerifiers that may be asked: what each runs, which of them is asked now."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Any

import grpc

from tandem.rpc import wire
from tandem.rpc.answer_times import AnswerTimes
from tandem.rpc.channel import TARGET, open_channel, stub
from tandem.rpc.closing import Closes
from tandem.rpc.credentials import Credentials
from tandem.rpc.endpoint_pool import CHECK_SECONDS, EndpointPool, Persistence, addresses_of, disagreement
from tandem.rpc.errors import TandemError, from_rpc
from tandem.rpc.generation_client import GenerationClient
from tandem.rpc.liveness import Health, check_health
from tandem.speculation.types import ModelInfo
from tandem.v1 import target_verifier_pb2 as pb

_RETIRED_SECONDS = 150.0  # for calls on a channel that is not used any more: more than the longest, an opening, has


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds for each call; `admission` is how long a full server is asked again.

    Where another verifier could be asked: `silence` is how long one may answer nothing, health checks included, and
    `stall` how long one that is serving may take; longer where that is usual, shorter where the request's deadline is
    near (tandem/rpc/answer_times.py).
    """

    open: float = 120.0
    verify: float = 30.0
    close: float = 2.0
    admission: float = 600.0
    silence: float = 3.0
    stall: float = 4.0


class Endpoint:
    """A channel to one TargetVerifier.

    `streams`: whether it knows VerifyStream; None: not tried yet. `suspect`: whoever answers there next may be another
    server than before, and is asked what it runs.
    """

    def __init__(self, address: str, credentials: Credentials | None = None) -> None:
        self.address, self._credentials = address, credentials
        self.streams: bool | None = None
        self.suspect = True
        self.channel = open_channel(address, credentials)
        self.stub: Any = stub(self.channel, TARGET)
        self._retiring: set[asyncio.Task[None]] = set()

    def reconnect(self) -> None:
        """A channel that could not connect waits, seconds in the end, before it tries again; a new one tries at once.

        Calls that others have begun on the old one end by themselves: they would be cancelled if it were closed now.
        """
        if self.channel.get_state() is not grpc.ChannelConnectivity.TRANSIENT_FAILURE:
            return
        with contextlib.suppress(ValueError):  # files of credentials that are being replaced just now
            retired, self.channel = self.channel, open_channel(self.address, self._credentials)
            self.stub = stub(self.channel, TARGET)
            closing = asyncio.create_task(retired.close(_RETIRED_SECONDS), name="close channel")
            self._retiring.add(closing)
            closing.add_done_callback(self._retiring.discard)

    async def close(self) -> None:
        for closing in self._retiring:
            closing.cancel()
        await asyncio.gather(*self._retiring, return_exceptions=True)
        await self.channel.close()

    async def health(self, seconds: float) -> Health:
        return await check_health(self.channel, TARGET, seconds)

    async def info(self, seconds: float) -> ModelInfo:
        """What it runs, if it answers now. Raises TandemError."""
        try:
            reply = await self.stub.GetModelInfo(pb.TargetVerifierGetModelInfoRequest(), timeout=seconds)
        except grpc.RpcError as error:
            raise from_rpc(error) from None
        return wire.info_from_wire(reply.model)


class VerifierClient:
    """Channels to the TargetVerifiers at "HOST:PORT[,HOST:PORT...]", shared by the requests of a process.

    All but the first that answered must run what that one runs (`expected`). Raises ValueError.
    """

    def __init__(
        self,
        addresses: str,
        tokenizer_sha256: str,
        deadlines: Deadlines | None = None,
        persistence: Persistence | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        self.tokenizer_sha256 = tokenizer_sha256
        self.deadlines, self.persistence = deadlines or Deadlines(), persistence or Persistence()
        self.pool = EndpointPool(addresses_of(addresses))
        self.endpoints = {address: Endpoint(address, credentials) for address in self.pool.addresses}
        self.times = AnswerTimes()
        self.expected: ModelInfo | None = None
        self.closes = Closes()

    @property
    def address(self) -> str:
        """Of the verifier that is asked now."""
        return self.pool.current

    @property
    def endpoint(self) -> Endpoint:
        return self.endpoints[self.pool.current]

    async def model_info(self, timeout: float = 30.0) -> ModelInfo:
        """What the first verifier to answer runs; waits up to `timeout` seconds for one. Raises TandemError."""
        asking = {
            asyncio.create_task(GenerationClient(endpoint.channel, TARGET).model_info(timeout)): endpoint
            for endpoint in self.endpoints.values()
        }
        try:
            while not (answered := [task for task in asking if task.done() and not task.exception()]):
                pending = [task for task in asking if not task.done()]
                if not pending:
                    error = next(iter(asking)).exception()
                    assert isinstance(error, TandemError)
                    raise TandemError(error.code, f"no TargetVerifier at {self.pool}: {error.message}")
                await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
        endpoint = asking[answered[0]]
        endpoint.suspect, self.pool.current = False, endpoint.address
        self.expected = answered[0].result()
        return self.expected

    def alone(self, endpoint: Endpoint) -> bool:
        """True if `endpoint` is the only verifier that may be asked."""
        return self.pool.after(endpoint.address) == endpoint.address

    async def check(self, endpoint: Endpoint, seconds: float) -> None:
        """Whether sessions may go on there. Raises TandemError: FAILED_PRECONDITION where it runs something else."""
        if not endpoint.suspect:
            return
        endpoint.reconnect()
        if self.expected is None:
            return
        found = disagreement(self.expected, await endpoint.info(min(seconds, CHECK_SECONDS)))
        if found:
            raise TandemError("FAILED_PRECONDITION", f"the TargetVerifier at {endpoint.address}: {found}")
        endpoint.suspect = False

    async def close(self) -> None:
        """After the sessions that are being closed, waited for a moment."""
        await self.closes.settle()
        await asyncio.gather(*(endpoint.close() for endpoint in self.endpoints.values()))
