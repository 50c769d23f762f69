"""DraftWorker: drives the distributed loop against a TargetVerifier."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

import grpc

from clients import wire
from services.generation import GenerateMethod
from speculation.types import ModelInfo
from tandem.v1 import draft_worker_pb2 as pb
from tandem.v1 import draft_worker_pb2_grpc


class DraftWorkerService(draft_worker_pb2_grpc.DraftWorkerServicer):
    """Thin: everything happens in the generator."""

    def __init__(self, info: ModelInfo, generate: GenerateMethod) -> None:
        self._info, self._generate = info, generate

    async def GetModelInfo(
        self, request: pb.DraftWorkerGetModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.DraftWorkerGetModelInfoResponse:
        return pb.DraftWorkerGetModelInfoResponse(model=wire.info_to_wire(self._info))

    async def Generate(
        self, request: pb.DraftWorkerGenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[pb.DraftWorkerGenerateResponse, None]:
        async with contextlib.aclosing(self._generate.stream(request)) as replies:
            async for reply in replies:
                yield reply
