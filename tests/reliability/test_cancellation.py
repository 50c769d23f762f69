"""G7: a request that is cancelled at any await of its way leaves nothing behind: no slot, session, task, or close.

No lease runs out here, so whatever is freed was freed by a close; with one slot everywhere, the next request shows it.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from tandem.rpc import wire
from tandem.rpc.channel import MESSAGES
from tandem.rpc.verifier_client import SessionCloses
from tandem.speculation.loop import finish
from tandem.speculation.verification_mode import Pipeline
from tandem.v1 import draft_worker_pb2, target_verifier_pb2
from tests.daily import daily
from tests.support import (
    GREEDY,
    Site,
    answer,
    distributed,
    fused_site,
    ids,
    oracle,
    remote_draft,
    target_site,
    toy,
    until,
    worker_site,
)

ASKED = ids(b"abcab", 5, ignore_end_of_sequence=True)
TRUTH = oracle(b"abcab", GREEDY, 5, past_the_end=True)
FOR_EVER = 1e6


@dataclass
class Way:
    """One way to ask, which says tokens; the sites that it goes through; and the closes of its clients."""

    ask: Callable[[], Coroutine[Any, Any, tuple[int, ...]]]
    sites: list[Site]
    closes: SessionCloses | None = None

    def quiet(self) -> bool:
        """Whether nothing is held anywhere."""
        return (
            all(site.engine is None or site.free == site.engine.slots.count for site in self.sites)
            and all(site.engine is None or not site.engine.slots.waiting for site in self.sites)
            and not any(len(site.verifier.sessions) for site in self.sites if site.verifier)
            and not any(len(site.worker.sessions) for site in self.sites if site.worker)
            and all(site.lifecycle.running == 0 for site in self.sites)
            and not self.closes
        )


def served(site: Site) -> Callable[[], Coroutine[Any, Any, tuple[int, ...]]]:
    """As the service's own handler does: what is cancelled is the call, on the server."""
    method = site.method
    assert method is not None
    message = getattr(MESSAGES[site.service], f"{site.service}GenerateRequest")
    request = message(generation=wire.generation_to_wire(ASKED))

    async def ask() -> tuple[int, ...]:
        async with contextlib.aclosing(method.stream(request)) as replies:
            return tuple([token async for reply in replies for token in reply.chunk.token_ids])

    return ask


def generated(generate: Any) -> Callable[[], Coroutine[Any, Any, tuple[int, ...]]]:
    async def ask() -> tuple[int, ...]:
        return (await answer(generate, ASKED)).token_ids

    return ask


@contextlib.asynccontextmanager
async def autoregressive() -> AsyncIterator[Way]:
    async with target_site(toy(slots=1), FOR_EVER) as site:
        yield Way(served(site), [site])


@contextlib.asynccontextmanager
async def fused() -> AsyncIterator[Way]:
    async with fused_site(toy(slots=1), toy(slots=1), 2) as site:
        yield Way(served(site), [site])


@contextlib.asynccontextmanager
async def _distributed(pipeline: Pipeline) -> AsyncIterator[Way]:
    async with (
        target_site(toy(slots=1), FOR_EVER) as site,
        distributed(site.address, "miss=0.3", 1, pipeline=pipeline, k=2) as (generator, client),
    ):
        yield Way(generated(generator.generate), [site], client.closes)


@contextlib.asynccontextmanager
async def draft_worker() -> AsyncIterator[Way]:
    async with (
        target_site(toy(slots=1), FOR_EVER) as site,
        worker_site(site.address, "miss=0.3", 1, lease_seconds=FOR_EVER) as worker,
    ):
        yield Way(served(worker), [worker, site])


@contextlib.asynccontextmanager
async def _remote_draft(pipeline: Pipeline) -> AsyncIterator[Way]:
    async with (
        worker_site(None, "miss=0.3", 1, lease_seconds=FOR_EVER) as worker,
        remote_draft(worker.address, toy(slots=1), k=2, pipeline=pipeline) as (generator, _),
    ):
        yield Way(generated(generator.generate), [worker])


@contextlib.asynccontextmanager
async def sessions_methods() -> AsyncIterator[Way]:
    """The methods of a session as their handlers; what is cancelled is a handler, and its caller closes."""
    pb = target_verifier_pb2
    async with target_site(toy(slots=1, chunk=2), FOR_EVER) as site:
        service, calls = site.verifier, iter(range(1_000_000))
        assert service is not None

        async def ask() -> tuple[int, ...]:
            name, tokens = f"s{next(calls)}", list(b"abcab")
            try:
                await service.OpenSession(
                    pb.OpenSessionRequest(session_id=name, prefix=tokens, prompt_length=1, sampling={}), None
                )
                while len(tokens) < 10:
                    round_ = pb.VerifyRequest(session_id=name, base_length=len(tokens), last_token=tokens[-1])
                    tokens += (await service.Verify(round_, None)).token_ids
                return tuple(tokens[5:])
            finally:
                await finish(_ignored(service.CloseSession(pb.CloseSessionRequest(session_id=name), None)))

        yield Way(ask, [site])


@contextlib.asynccontextmanager
async def proposals_methods() -> AsyncIterator[Way]:
    pb = draft_worker_pb2
    async with worker_site(None, "", 1, lease_seconds=FOR_EVER) as site:
        worker = site.worker
        assert worker is not None

        async def ask() -> tuple[int, ...]:
            tokens = list(b"abcab")

            async def messages() -> AsyncIterator[pb.ProposeRequest]:
                yield pb.ProposeRequest(tokens=tokens, sampling={}, speculation_length=1)
                while True:
                    await drafted.wait()
                    drafted.clear()
                    if over:
                        return
                    yield pb.ProposeRequest(tokens=tokens[-1:], speculation_length=1)

            drafted, over = asyncio.Event(), False
            try:
                async with contextlib.aclosing(worker.Propose(messages(), None)) as replies:
                    async for reply in replies:
                        tokens += reply.draft_tokens
                        if len(tokens) == 10:
                            break
                        drafted.set()
            finally:
                over = True  # as gRPC ends the messages with the call
                drafted.set()
            return tuple(tokens[5:])

        yield Way(ask, [site])


async def _ignored(work: Coroutine[Any, Any, Any]) -> None:
    await work


WAYS: dict[str, Callable[[], Any]] = {
    "autoregressive": autoregressive,
    "fused": fused,
    "unary": partial(_distributed, Pipeline.OFF),
    "pipelined": partial(_distributed, Pipeline.ON),
    "running": partial(_distributed, Pipeline.NEVER_WAITING),
    "draft_worker": draft_worker,
    "proposing": partial(_remote_draft, Pipeline.OFF),
    "followed": partial(_remote_draft, Pipeline.NEVER_WAITING),
    "sessions_methods": sessions_methods,
    "proposals_methods": proposals_methods,
}
# As it suspends; as what it waits for comes; and a second time while it cleans up.
HOW: tuple[dict[str, Any], ...] = ({}, {"late": True}, *({"again": n} for n in (1, 2, 3, 5)))


async def cancel_everywhere(way: Way, how: dict[str, Any]) -> int:
    """Cancels the request at its first suspension, at its second, ... until it ends before. How often that was."""
    assert await way.ask() == TRUTH
    at = 1
    while True:
        injection = Injection(at, **how)
        await injected(way.ask, injection)
        assert not injection.swallowed, f"the request went on after its cancellation at suspension {at}"
        await until(lambda injection=injection: way.quiet() and injection.over, 20.0)
        if not injection.fired:
            break
        at += 1
    assert await way.ask() == TRUTH
    return at - 1


@pytest.mark.each_value
@pytest.mark.parametrize("how", daily(HOW, 0, 1, 2), ids=str)
@pytest.mark.parametrize("way", daily(WAYS, *(i for i, way in enumerate(WAYS) if way not in ("unary", "draft_worker"))))
async def test_cancelled_anywhere_and_in_any_manner_nothing_stays(way: str, how: dict[str, Any]) -> None:
    async with WAYS[way]() as opened:
        assert await cancel_everywhere(opened, how) >= 5


_HERE: ContextVar[Injection | None] = ContextVar("injection", default=None)


@dataclass(eq=False)
class Injection:
    """Where a request is cancelled: at its `at`-th suspension (from 1).

    `late`: not as it suspends, but in the moment in which what it waits for has come. `again`: once more, so many
    suspensions later. `taken`: it was told in time, and must end by it. `tasks`: all that it began.
    """

    at: int
    late: bool = False
    again: int = 0
    count: int = 0
    taken: bool = False
    request: asyncio.Task[Any] | None = None
    tasks: weakref.WeakSet[asyncio.Task[Any]] = field(default_factory=weakref.WeakSet)

    @property
    def fired(self) -> bool:
        return self.count >= self.at

    @property
    def over(self) -> bool:
        """Nothing that it began goes on."""
        return all(task.done() for task in self.tasks)

    def suspended(self, until: asyncio.Future[Any] | None) -> None:
        self.count += 1
        if self.count == self.at or (self.again and self.count == self.at + self.again):
            if not self.late:
                self._cancel()
            elif until is None:
                asyncio.get_running_loop().call_soon(self._cancel)
            else:
                until.add_done_callback(self._cancel)

    def _cancel(self, _: Any = None) -> None:
        assert self.request is not None
        self.taken |= self.request.cancel()

    @property
    def swallowed(self) -> bool:
        """It was cancelled, and ended as if it were not."""
        assert self.request is not None
        return self.taken and not self.request.cancelled()


class _Watched(Coroutine[Any, Any, Any]):
    """`work`, whose every suspension is told."""

    def __init__(self, work: Coroutine[Any, Any, Any], injection: Injection) -> None:
        self._work, self._injection = work, injection

    def __await__(self) -> Generator[Any, Any, Any]:
        raise NotImplementedError("a task drives it")

    def send(self, value: Any) -> Any:
        return self._told(self._work.send(value))

    def throw(self, *error: Any) -> Any:
        return self._told(self._work.throw(*error))

    def close(self) -> None:
        self._work.close()

    def _told(self, until: asyncio.Future[Any] | None) -> asyncio.Future[Any] | None:
        self._injection.suspended(until)
        return until


def _task(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
    injection = _HERE.get()
    if injection is None:
        return asyncio.Task(work, loop=loop, **options)
    task = asyncio.Task(_Watched(work, injection), loop=loop, **options)
    injection.tasks.add(task)
    return task


async def injected(request: Callable[[], Coroutine[Any, Any, Any]], injection: Injection) -> None:
    """Runs a request to its end, which is its own or the cancellation."""
    loop = asyncio.get_running_loop()
    loop.set_task_factory(_task)
    token = _HERE.set(injection)
    try:
        injection.request = loop.create_task(request())
    finally:
        _HERE.reset(token)
    with contextlib.suppress(asyncio.CancelledError):
        await injection.request
