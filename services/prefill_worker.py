"""The role prefill: computes prompts for remote targets and streams their pages."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING

from tandem.clients.prefill_client import PrefillClient, layout_from_wire, layout_to_wire, run_to_wire
from tandem.engine.adapter_registry import Adapters
from tandem.engine.engine import Engine
from tandem.engine.generator import check_tokens
from tandem.engine.generators import target_info
from tandem.engine.load_models import close, load, load_adapters
from tandem.engine.prefill import PageCopies, PrefillPages, RemotePrefill
from tandem.rpc import wire
from tandem.runners.capabilities import PAGE
from tandem.services.calls import Context
from tandem.services.security.callers import caller
from tandem.services.security.limits import ServerLimits, check_name
from tandem.services.server import HostedService
from tandem.services.shutdown import Lifecycle
from tandem.services.statuses import ModelMismatch, QueueFull
from tandem.speculation.types import InvalidField, ModelInfo, Request, TooLong
from tandem.v1 import prefill_worker_pb2 as pb
from tandem.v1.prefill_worker_pb2_grpc import PrefillWorkerServicer, add_PrefillWorkerServicer_to_server

if TYPE_CHECKING:
    from tandem.services.server_roles import ServerParts

log = logging.getLogger("tandem.server")
QUEUE = 4


class PrefillWorkerService(PrefillWorkerServicer):
    """`queue`: prompts waiting for a slot; others are refused at once, as the caller can compute them."""

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

    async def GetModelInfo(
        self, request: pb.PrefillWorkerGetModelInfoRequest, context: Context
    ) -> pb.PrefillWorkerGetModelInfoResponse:
        model, layout = wire.info_to_wire(self._info), layout_to_wire(self._pages.layout)
        return pb.PrefillWorkerGetModelInfoResponse(model=model, layout=layout)

    async def Prefill(self, request: pb.PrefillRequest, context: Context) -> AsyncGenerator[pb.PrefillResponse, None]:
        self._check(request)
        with self._lifecycle.work(), self._running.one(caller()):
            if self._lifecycle.running > self._info.kv_slots + self._queue:
                raise QueueFull(f"{self._info.kv_slots} slots are taken and {self._queue} prompts wait")
            runs = self._pages.of(tuple(request.token_ids), request.first_page, Request(adapter=request.adapter))
            async with contextlib.aclosing(runs):
                async for run in runs:
                    yield pb.PrefillResponse(pages=run_to_wire(run))

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
            raise InvalidField("first_page", f"{request.first_page} is not below {count // PAGE}, the prompt's pages")
        check_tokens("token_ids", list(request.token_ids), self._info.vocab_size)
        revision = self._adapters.revision(request.adapter)
        if request.adapter_revision != revision:
            raise InvalidField("adapter_revision", f"this server's {request.adapter} is {revision[:12] or 'none'}")


async def prefill(parts: ServerParts) -> HostedService:
    """Builds the role. Raises ValueError if the model's pages cannot be copied."""
    config = await parts.choose_sizes(parts.config.models.model)
    loaded = await load(config.models, parts.batcher, config.serve.startup)
    await load_adapters(config.models, loaded)
    pages = PrefillPages(loaded.engine, await PageCopies.of(loaded.runner, parts.batcher))
    info = parts.stamped(target_info(loaded, 0))
    parts.observability.loaded(info)
    await parts.share({"target": loaded.engine}, loaded.engine)
    if metrics := parts.observability.metrics:
        metrics.states.watch("prefill pages", pages)
    log.info(
        "%s: computes prompts of %s in %d slots for targets that decode elsewhere; a page of %d tokens has %d bytes",
        info.model_name,
        info.dtype,
        info.kv_slots,
        pages.layout.page_tokens,
        pages.layout.page_bytes,
    )
    service = PrefillWorkerService(info, pages, loaded.engine.adapters, parts.lifecycle, parts.limits)
    return parts.hosted(
        partial(add_PrefillWorkerServicer_to_server, service), [partial(close, loaded, parts.batcher)], loaded.engine
    )


async def connect_remote_prefill(parts: ServerParts, engine: Engine) -> list[Callable[[], Awaitable[None]]]:
    """Connects --prefill, if given; returns closers. Raises ValueError."""
    config = parts.config.prefill
    if config is None:
        return []
    copies = await PageCopies.of(engine.runner, parts.batcher)
    client = PrefillClient(config, copies.layout, parts.config.credentials)
    engine.remote_prefill = RemotePrefill(engine, client.fetch, copies, config.min_tokens)
    await client.check()
    log.info("prompts of %d tokens and more are computed at %s", config.min_tokens, config.addresses)
    return [client.close]
