"""PrefillWorker service: computes prompts for targets that decode elsewhere, and streams their pages."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor

import grpc

from tandem.clients.page_wire import layout_from_wire, layout_to_wire, run_to_wire
from tandem.engine.adapter_registry import Adapters
from tandem.engine.generator import check_tokens
from tandem.engine.prefill_pages import PrefillPages
from tandem.rpc import wire
from tandem.runners.pages import PAGE
from tandem.services.errors import ModelMismatch, QueueFull
from tandem.services.lifecycle import Lifecycle
from tandem.services.security.identity import caller
from tandem.services.security.limits import ServerLimits
from tandem.services.security.names import check_name
from tandem.speculation.types import InvalidField, ModelInfo, Request, SpeculationStats, TooLong
from tandem.v1 import prefill_worker_pb2 as pb
from tandem.v1 import prefill_worker_pb2_grpc

QUEUE = 4


class PrefillWorkerService(prefill_worker_pb2_grpc.PrefillWorkerServicer):
    """`queue`: prompts that may wait for a slot; further ones are refused at once, since the caller can do the work."""

    def __init__(
        self,
        info: ModelInfo,
        pages: PrefillPages,
        adapters: Adapters,
        lifecycle: Lifecycle,
        limits: ServerLimits | None = None,
        queue: int = QUEUE,
    ) -> None:
        self._info, self._pages, self._adapters, self._lifecycle = info, pages, adapters, lifecycle
        self._running, self._queue = (limits or ServerLimits()).running(), queue
        self._instance = uuid.uuid4().hex
        self._thread = ThreadPoolExecutor(1, "pages")

    async def GetModelInfo(
        self, request: pb.PrefillWorkerGetModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.PrefillWorkerGetModelInfoResponse:
        model, layout = wire.info_to_wire(self._info), layout_to_wire(self._pages.layout)
        return pb.PrefillWorkerGetModelInfoResponse(model=model, layout=layout)

    async def Prefill(
        self, request: pb.PrefillRequest, context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[pb.PrefillResponse, None]:
        self._check(request)
        loop = asyncio.get_running_loop()
        tokens, stats, sent = tuple(request.token_ids), SpeculationStats(), 0
        with self._lifecycle.work(), self._running.one(caller()):
            if self._lifecycle.running > self._info.kv_slots + self._queue:
                raise QueueFull(f"{self._info.kv_slots} slots are taken and {self._queue} prompts wait")
            asked = len(tokens) // PAGE - request.first_page
            header = pb.PrefillHeader(layout=layout_to_wire(self._pages.layout), pages=asked, instance=self._instance)
            yield pb.PrefillResponse(header=header)
            wanted = Request(adapter=request.adapter)
            async with contextlib.aclosing(self._pages.of(tokens, request.first_page, wanted, stats)) as runs:
                async for run in runs:
                    sent += len(run.pages)
                    yield pb.PrefillResponse(pages=await loop.run_in_executor(self._thread, run_to_wire, run))
            end = pb.PrefillEnd(
                pages=sent,
                cached_tokens=stats.cached_prompt_tokens,
                queue_seconds=stats.queue_seconds,
                compute_seconds=stats.prefill_seconds,
            )
            yield pb.PrefillResponse(end=end)

    def _check(self, request: pb.PrefillRequest) -> None:
        for name in ("adapter", "adapter_revision"):
            check_name(name, getattr(request, name))
        difference = self._pages.layout.difference(layout_from_wire(request.layout))
        if difference:
            raise ModelMismatch(f"layout: the caller's pages are not those of this model: {difference}")
        count, most = len(request.token_ids), self._info.max_sequence_length
        if count > most:
            raise TooLong(f"the prompt has {count} tokens and the sequence length is {most}")
        if not count or count % PAGE:
            raise InvalidField("token_ids", f"{count} tokens do not fill pages of {PAGE}")
        if request.first_page >= count // PAGE:
            raise InvalidField("first_page", f"{request.first_page} is not below {count // PAGE}, the pages asked for")
        check_tokens("token_ids", list(request.token_ids), self._info.vocab_size)
        revision = self._adapters.revision(request.adapter)
        if request.adapter_revision != revision:
            raise InvalidField("adapter_revision", f"this server's {request.adapter} is {revision[:12] or 'none'}")
