"""DraftWorker service: generates with a remote TargetVerifier and proposes drafts to targets."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator

from tandem.rpc import wire
from tandem.services.calls import Context
from tandem.services.errors import NotOffered
from tandem.services.generation import GenerateMethod
from tandem.services.sessions.proposals import Proposals
from tandem.speculation.types import ModelInfo
from tandem.v1 import draft_worker_pb2 as pb
from tandem.v1 import draft_worker_pb2_grpc


class DraftWorkerService(draft_worker_pb2_grpc.DraftWorkerServicer):
    def __init__(self, info: ModelInfo, generate: GenerateMethod | None, proposals: Proposals) -> None:
        self._info, self._generate, self._proposals = info, generate, proposals

    async def GetModelInfo(
        self, request: pb.DraftWorkerGetModelInfoRequest, context: Context
    ) -> pb.DraftWorkerGetModelInfoResponse:
        return pb.DraftWorkerGetModelInfoResponse(model=wire.info_to_wire(self._info))

    def Generate(
        self, request: pb.DraftWorkerGenerateRequest, context: Context
    ) -> AsyncGenerator[pb.DraftWorkerGenerateResponse, None]:
        if self._generate is None:
            raise NotOffered("this DraftWorker only proposes: it was started without a TargetVerifier")
        return self._generate.stream(request, context.time_remaining())

    def Propose(
        self, request_iterator: AsyncIterator[pb.ProposeRequest], context: Context
    ) -> AsyncGenerator[pb.ProposeResponse, None]:
        return self._proposals.stream(request_iterator)
