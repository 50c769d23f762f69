"""Client of Generate, which all three services share."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import grpc

from tandem.rpc import wire
from tandem.rpc.channel import MESSAGES, STUBS, open_channel, unary
from tandem.rpc.credentials import Credentials
from tandem.rpc.received_errors import TandemError, contract, from_rpc
from tandem.rpc.request_context import MAX_REQUEST_ID, RequestContext, current, current_span, new_id, outgoing, valid_id
from tandem.speculation.types import Chunk, GenerationEnd, GenerationRequest, InvalidField, ModelInfo


class GenerationClient:
    """Sends concurrent requests to one server; counts payload bytes over its lifetime."""

    def __init__(self, channel: grpc.aio.Channel, service: str) -> None:
        self._channel, self._service = channel, service
        self._stub, self._messages = STUBS[service](channel), MESSAGES[service]
        self.bytes_up = self.bytes_down = 0

    @classmethod
    def connect(cls, address: str, service: str, credentials: Credentials | None = None) -> GenerationClient:
        return cls(open_channel(address, credentials), service)

    async def __aenter__(self) -> GenerationClient:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def sharing(self) -> GenerationClient:
        """Returns a client of the same connection with own byte counts; closing either closes both."""
        return GenerationClient(self._channel, self._service)

    async def close(self) -> None:
        await self._channel.close()

    async def model_info(self, timeout: float = 10.0, wait: bool = True) -> ModelInfo:
        request = getattr(self._messages, f"{self._service}GetModelInfoRequest")()
        reply = await unary(self._stub.GetModelInfo, request, timeout=timeout, wait_for_ready=wait)
        with contract(f"this {self._service}"):
            return wire.info_from_wire(reply.model)

    async def generate(
        self, request: GenerationRequest, timeout: float | None = None, request_id: str | None = None
    ) -> AsyncGenerator[Chunk | GenerationEnd, None]:
        """Yields committed chunks, then the end; closing cancels. Raises TandemError."""
        make = getattr(self._messages, f"{self._service}GenerateRequest")
        message = make(generation=wire.generation_to_wire(request))
        about, adapter, produced = _request(self._service, request_id), request.adapter, list[int]()
        self.bytes_up += message.ByteSize()
        call = self._stub.Generate(message, timeout=timeout, metadata=outgoing(about))
        failed = ""
        try:
            async for reply in call:
                self.bytes_down += reply.ByteSize()
                with contract(f"this {self._service}"):
                    if reply.WhichOneof("event") == "completion":
                        event: Chunk | GenerationEnd = wire.completion_from_wire(reply.completion)
                    else:
                        event = wire.chunk_from_wire(reply.chunk)
                if isinstance(event, GenerationEnd):
                    if request.receipt and not event.receipt:
                        raise TandemError("FAILED_PRECONDITION", "receipt: this server does not sign any")
                elif adapter and reply.chunk.adapter != adapter:
                    raise TandemError("FAILED_PRECONDITION", "adapter: this server does not apply it")
                elif request.logprobs is not None and len(event.logprobs) != len(event.token_ids):
                    raise TandemError("FAILED_PRECONDITION", "logprobs: this server does not report them")
                else:
                    adapter = ""
                    produced += event.token_ids
                yield event
        except (grpc.RpcError, TandemError) as error:
            refused = error if isinstance(error, TandemError) else from_rpc(error)
            failed, refused.request_id = refused.code, about.id
            refused.produced = tuple(produced) or refused.produced
            raise refused from None
        finally:
            call.cancel()
            if about.span:
                about.span.end(failed)


def _request(service: str, given: str | None) -> RequestContext:
    if given is not None and not valid_id(given):
        raise InvalidField("request_id", f"{given!r} is not 1 to {MAX_REQUEST_ID} visible ASCII characters")
    request, parent = current(), current_span()
    span = parent.child("generate", {"rpc.service": service}, "client") if parent else None
    return RequestContext(given or (request.id if request else new_id()), span)
