"""PrefillWorkers of toy runners here, and targets that ask them; faults are put between the two."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tandem.clients.prefill_client import PrefillClient, PrefillConfig
from tandem.engine.batcher import Batcher
from tandem.engine.engine import Engine
from tandem.engine.generators import target_info
from tandem.engine.load_models import Loaded
from tandem.engine.prefill import PageCopies, PrefillPages, RemotePrefill
from tandem.engine.prefix_cache import PrefixSharing, share_prefixes
from tandem.rpc.credentials import Credentials
from tandem.rpc.request_context import prefix_scope
from tandem.runners.protocol import PrefillRow, Runner
from tandem.services.prefill_worker import QUEUE, PrefillWorkerService
from tandem.services.security.access import Security
from tandem.services.shutdown import Lifecycle
from tandem.v1.prefill_worker_pb2_grpc import add_PrefillWorkerServicer_to_server
from tests.support import engine_of, listening, toy
from tests.toy import ToyRunner, ToyTokenizer

LEAST = 32
"""Tokens to process from which on the targets here ask."""


class Counting(ToyRunner):
    """Counts the tokens that it processes as prompts."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.processed = 0

    def prefill(self, rows: Sequence[PrefillRow]) -> Any:
        self.processed += sum(len(row.tokens) for row in rows)
        return super().prefill(rows)


Answer = Callable[[Any, Any], Any]
"""Changes what a worker answers: (its replies, the call's context) to replies."""


@dataclass
class Worker:
    """A PrefillWorker that listens here. `answer` changes what it answers; `asked` counts its calls."""

    address: str
    engine: Engine
    lifecycle: Lifecycle
    pages: PrefillPages
    faults: Faults

    @property
    def runner(self) -> Any:
        return self.engine.runner


@dataclass
class Faults:
    """What stands before a worker's service."""

    answer: Answer | None = None
    asked: int = 0
    scopes: list[str] = field(default_factory=list)


class FaultyService(PrefillWorkerService):
    """Answers as `faults` say."""

    def __init__(self, *args: Any, faults: Faults) -> None:
        super().__init__(*args)
        self._faults = faults

    async def Prefill(self, request: Any, context: Any) -> Any:
        self._faults.asked += 1
        self._faults.scopes.append(prefix_scope())
        replies = super().Prefill(request, context)
        changed = self._faults.answer(replies, context) if self._faults.answer else replies
        async with contextlib.aclosing(replies), contextlib.aclosing(changed):
            async for reply in changed:
                yield reply


@contextlib.asynccontextmanager
async def prefill_site(
    runner: Runner | None = None, queue: int = QUEUE, security: Security | None = None, port: int = 0
) -> AsyncIterator[Worker]:
    """A PrefillWorker, which keeps no prefixes."""
    batcher, lifecycle, faults = Batcher("test-prefill"), Lifecycle(), Faults()
    engine = engine_of(runner or toy(kind=Counting), batcher)
    try:
        pages = PrefillPages(engine, await PageCopies.of(engine.runner, batcher))
        info = target_info(Loaded(engine, ToyTokenizer()), 0)
        limits = security.limits if security else None
        service = FaultyService(info, pages, engine.adapters, lifecycle, limits, queue, faults=faults)
        register = partial(add_PrefillWorkerServicer_to_server, service)
        async with listening(register, port, security=security) as address:
            yield Worker(address, engine, lifecycle, pages, faults)
    finally:
        await batcher.close()


async def asks(
    engine: Engine,
    addresses: str,
    least: int = LEAST,
    seconds: float = 30.0,
    credentials: Credentials | None = None,
    shares: str = "identity",
) -> PrefillClient:
    """Makes an engine have its prompts computed at `addresses`, and keep prefixes as `shares` says."""
    await share_prefixes([engine], PrefixSharing(shares, 1), prefix_scope)
    copies = await PageCopies.of(engine.runner, engine.batcher)
    client = PrefillClient(PrefillConfig(addresses, least, seconds), copies.layout, credentials)
    engine.remote_prefill = RemotePrefill(engine, client.fetch, copies, least)
    return client


def source_of(engine: Engine) -> Any:
    """Where an engine has its prompts computed."""
    assert engine.remote_prefill is not None
    return engine.remote_prefill.fetch.__self__


def wake(engine: Engine) -> None:
    """Workers that rest after a failure are asked again at once."""
    for endpoint in source_of(engine).endpoints:
        endpoint.rests_until = 0.0


@contextlib.asynccontextmanager
async def asking_engine(addresses: str, runner: Runner | None = None, **settings: Any) -> AsyncIterator[Engine]:
    """A target's engine of its own, without a server."""
    engine = engine_of(runner or toy(kind=Counting), Batcher("test-target"))
    elsewhere = await asks(engine, addresses, **settings)
    try:
        yield engine
    finally:
        await elsewhere.close()
        await engine.batcher.close()
