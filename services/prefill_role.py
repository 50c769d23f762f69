"""The role prefill, and what connects a target to servers of that role."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING

from tandem.clients.prefill_client import PrefillClient
from tandem.engine.engine import Engine
from tandem.engine.generators import target_info
from tandem.engine.loading import close, load, load_adapters
from tandem.engine.page_copies import PageCopies
from tandem.engine.prefill_pages import PrefillPages
from tandem.engine.remote_prefill import RemotePrefill
from tandem.services.observability.prefill_metrics import watch_prefill, watch_prefill_pages
from tandem.services.prefill_worker import PrefillWorkerService
from tandem.services.server import HostedService
from tandem.v1.prefill_worker_pb2_grpc import add_PrefillWorkerServicer_to_server

if TYPE_CHECKING:
    from tandem.services.roles import ServerParts

log = logging.getLogger("tandem.server")


async def prefill(parts: ServerParts) -> HostedService:
    """Computes prompts for targets that decode elsewhere. Raises ValueError if this model's pages cannot be copied."""
    config = await parts.choose_sizes(parts.config.models.model)
    loaded = await load(config.models, parts.batcher, config.serve.startup)
    await load_adapters(config.models, loaded)
    pages = PrefillPages(loaded.engine, await PageCopies.of(loaded.runner, parts.batcher))
    info = parts.stamped(target_info(loaded, 0))
    parts.observability.loaded(info)
    await parts.share_prefixes(target=loaded.engine)
    parts.observability.watch_parts(parts.lifecycle, parts.batcher, {"target": loaded.engine.slots})
    if metrics := parts.observability.metrics:
        watch_prefill_pages(metrics.states, pages)
    queue = config.prefill_queue
    service = PrefillWorkerService(info, pages, loaded.engine.adapters, parts.lifecycle, parts.limits, queue)
    log.info(
        "%s: computes prompts of %s in %d slots for targets that decode elsewhere; a page of %d tokens has %d bytes",
        info.model_name,
        info.dtype,
        info.kv_slots,
        pages.layout.page_tokens,
        pages.layout.page_bytes,
    )
    return parts.hosted(
        partial(add_PrefillWorkerServicer_to_server, service),
        [partial(close, loaded, parts.batcher)],
        loaded.engine,
        lost=loaded.engine.lost,
        beside=parts.beside(loaded.engine.adapters),
    )


async def connect_remote_prefill(parts: ServerParts, engine: Engine) -> list[Callable[[], Awaitable[None]]]:
    """Lets a target's prompts be computed by --prefill, if given; returns what closes that. Raises ValueError."""
    config = parts.config.prefill
    if config is None:
        return []
    copies = await PageCopies.of(engine.runner, parts.batcher)
    client = PrefillClient(config, copies.layout, parts.config.credentials)
    engine.remote_prefill = RemotePrefill(engine, client, copies, config.min_tokens)
    await engine.remote_prefill.measure()
    await client.check()
    if metrics := parts.observability.metrics:
        watch_prefill(metrics.states, engine.remote_prefill)
    log.info("prompts of %d tokens and more are computed at %s", config.min_tokens, config.addresses)
    return [engine.remote_prefill.close]
