"""FusedSpeculativeServer service: draft and target models in one process."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace

from tandem.engine.adapter_registry import Adapters
from tandem.rpc import wire
from tandem.services.calls import Context
from tandem.services.generation import GenerateMethod
from tandem.speculation.types import ModelInfo
from tandem.v1 import fused_speculative_server_pb2 as pb
from tandem.v1 import fused_speculative_server_pb2_grpc


class FusedSpeculativeServerService(fused_speculative_server_pb2_grpc.FusedSpeculativeServerServicer):
    """`adapters`: the target's."""

    def __init__(self, info: ModelInfo, generate: GenerateMethod, adapters: Adapters | None = None) -> None:
        self._info, self._generate, self._adapters = info, generate, adapters

    async def GetModelInfo(
        self, request: pb.FusedSpeculativeServerGetModelInfoRequest, context: Context
    ) -> pb.FusedSpeculativeServerGetModelInfoResponse:
        adapters = self._adapters.revisions if self._adapters else {}
        info = replace(self._info, adapters=tuple(adapters.items()))
        return pb.FusedSpeculativeServerGetModelInfoResponse(model=wire.info_to_wire(info))

    def Generate(
        self, request: pb.FusedSpeculativeServerGenerateRequest, context: Context
    ) -> AsyncGenerator[pb.FusedSpeculativeServerGenerateResponse, None]:
        return self._generate.stream(request, context.time_remaining())
