"""The generation client: one class, any of the three services."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from types import TracebackType

import grpc

from clients import wire
from clients.channel import MESSAGES, open_channel, stub
from clients.credentials import Credentials
from clients.errors import from_rpc
from speculation.types import Chunk, Completion, GenerationRequest, ModelInfo


class GenerationClient:
    """Asks one server for continuations. Many requests may run at once on one client.

    `bytes_up` and `bytes_down` count protobuf payload over the client's life.
    """

    def __init__(self, channel: grpc.aio.Channel, service: str) -> None:
        self._channel, self._service = channel, service
        self._stub, self._messages = stub(channel, service), MESSAGES[service]
        self.bytes_up = 0
        self.bytes_down = 0

    @classmethod
    def connect(cls, address: str, service: str, credentials: Credentials | None = None) -> GenerationClient:
        """A client of `service` (TargetVerifier, FusedSpeculativeServer or DraftWorker) at host:port."""
        return cls(open_channel(address, credentials), service)

    async def __aenter__(self) -> GenerationClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._channel.close()

    async def model_info(self, timeout: float = 10.0) -> ModelInfo:
        """What the server runs. Waits up to `timeout` seconds for it to answer. Raises TandemError."""
        request = getattr(self._messages, f"{self._service}GetModelInfoRequest")()
        try:
            reply = await self._stub.GetModelInfo(request, timeout=timeout, wait_for_ready=True)
        except grpc.RpcError as error:
            raise from_rpc(error) from None
        return wire.info_from_wire(reply.model)

    async def generate(
        self, request: GenerationRequest, timeout: float | None = None
    ) -> AsyncGenerator[Chunk | Completion, None]:
        """Chunks as they are committed, then the completion. Leaving early cancels the request. Raises TandemError."""
        message = getattr(self._messages, f"{self._service}GenerateRequest")(
            generation=wire.generation_to_wire(request)
        )
        self.bytes_up += message.ByteSize()
        call = self._stub.Generate(message, timeout=timeout)
        try:
            async for reply in call:
                self.bytes_down += reply.ByteSize()
                if reply.WhichOneof("event") == "completion":
                    yield wire.completion_from_wire(reply.completion)
                else:
                    yield wire.chunk_from_wire(reply.chunk)
        except grpc.RpcError as error:
            raise from_rpc(error) from None
        finally:
            call.cancel()
