"""The campaigns' own wire client."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import grpc
from grpc.aio import AioRpcError, Metadata

from tandem.speculation.types import SamplingParams
from tandem.v1 import target_verifier_pb2 as pb
from tests.reliability.traffic import Ask, WireClient

ASK = Ask((65, 1, 2), SamplingParams(), 4, 3)


class Stub:
    """A verifier whose first stream breaks in a write: grpc.aio then replaces the status of the call by its own."""

    def __init__(self) -> None:
        self.streams = 0

    async def OpenSession(self, request: Any, timeout: float) -> Any:
        return pb.OpenSessionResponse(committed_length=len(request.prefix))

    async def CloseSession(self, request: Any, timeout: float) -> Any:
        return pb.CloseSessionResponse()

    def VerifyStream(self, timeout: float) -> Any:
        self.streams += 1
        return Stream(breaks=self.streams == 1)


class Stream:
    def __init__(self, breaks: bool) -> None:
        self._breaks = breaks

    async def write(self, request: Any) -> None:
        if self._breaks:
            raise AioRpcError(grpc.StatusCode.INTERNAL, Metadata(), Metadata(), "Internal error from Core")
        self._asked = request

    async def read(self) -> Any:
        if self._asked.last_token != dict(enumerate((*ASK.prompt, *ASK.expected)))[self._asked.base_length - 1]:
            return pb.VerifyResponse(stale=True, committed_length=self._asked.base_length)
        return pb.VerifyResponse(token_ids=ASK.expected[self._asked.base_length - len(ASK.prompt) :][:1])

    def cancel(self) -> None:
        pass


def test_a_stream_that_breaks_in_a_write_is_opened_again() -> None:
    stub = Stub()
    client = WireClient(stub, ASK, random.Random(1), streams=True, pause=0.0)
    ended = asyncio.run(client.run())
    assert (list(ended.tokens), ended.error, stub.streams) == (list(ASK.expected), "", 2)
