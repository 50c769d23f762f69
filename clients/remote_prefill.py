"""Fetches the pages of prompts from PrefillWorkers: implements the engine's PageSource over gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any

import grpc

from tandem.clients.page_wire import Corrupt, layout_from_wire, layout_to_wire, run_from_wire
from tandem.engine.page_copies import PageLayout, PageRun
from tandem.engine.prefill_elsewhere import MIN_TOKENS
from tandem.engine.transfers import PrefillFailed, Wanted
from tandem.rpc.channel import open_channel
from tandem.rpc.credentials import Credentials
from tandem.rpc.endpoint_pool import parse_addresses
from tandem.rpc.errors import TandemError, from_rpc
from tandem.rpc.request_context import Attributes, Request, current, current_span, new_id, outgoing
from tandem.runners.pages import PAGE
from tandem.v1 import prefill_worker_pb2 as pb
from tandem.v1.prefill_worker_pb2_grpc import PrefillWorkerStub

log = logging.getLogger("tandem.prefill")

SECONDS = 5.0
_REST_FIRST, _REST_LONGEST = 0.5, 30.0
_MESSAGE_BYTES = 4 * 2**20
_REASONS = {
    "UNAVAILABLE": "unavailable",
    "CANCELLED": "unavailable",
    "DEADLINE_EXCEEDED": "late",
    "RESOURCE_EXHAUSTED": "busy",
    "FAILED_PRECONDITION": "mismatch",
    "INVALID_ARGUMENT": "refused",
    "OUT_OF_RANGE": "refused",
    "UNAUTHENTICATED": "refused",
    "PERMISSION_DENIED": "refused",
    "UNIMPLEMENTED": "refused",
}
_AT_ONCE = ("busy", "mismatch", "unavailable")
"""Failures that cost no time, after which another worker is asked, if nothing has come yet."""
_HEALTHY = ("busy", "refused")
"""Failures that say nothing against the worker."""


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """The PrefillWorkers of a target: HOST:PORT[,HOST:PORT...].

    `min_tokens`: prompts with fewer tokens to process are processed in place. `seconds`: how long the next pages may
    take to arrive, the wait for a slot there included.
    """

    addresses: str
    min_tokens: int = MIN_TOKENS
    seconds: float = SECONDS

    def __post_init__(self) -> None:
        parse_addresses(self.addresses, "prefill")
        if self.min_tokens < PAGE:
            raise ValueError(f"prefill_min_tokens: {self.min_tokens} is below {PAGE}, a page")
        if not self.seconds > 0:
            raise ValueError(f"prefill_timeout_s: {self.seconds} is not above 0")


class PrefillEndpoint:
    """A channel to one PrefillWorker. After a failure it rests for a while that doubles, to at most 30 s."""

    def __init__(
        self,
        address: str,
        layout: PageLayout,
        seconds: float,
        credentials: Credentials | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.address, self._layout, self._seconds, self._clock = address, layout, seconds, clock
        most = max(_MESSAGE_BYTES, layout.page_bytes + 2**16)
        # A name may stand for many workers: calls go to them in turn.
        options = (("grpc.max_receive_message_length", most), ("grpc.lb_policy_name", "round_robin"))
        self._channel = open_channel(address, credentials, options)
        self._stub: Any = PrefillWorkerStub(self._channel)
        self.running = 0
        self._failures, self._rests_until, self._said = 0, 0.0, ""

    @property
    def resting(self) -> bool:
        return self._clock() < self._rests_until

    async def check(self) -> None:
        """Asks for the worker's layout, and rests if it is not ours. Raises PrefillFailed."""
        try:
            reply = await self._stub.GetModelInfo(pb.PrefillWorkerGetModelInfoRequest(), timeout=self._seconds)
            self._same(reply.layout)
        except grpc.RpcError as error:
            raise self._failed(_from_call(from_rpc(error))) from None
        except PrefillFailed as error:
            raise self._failed(error) from None

    async def pages(self, wanted: Wanted) -> AsyncGenerator[PageRun, None]:
        """Yields the wanted pages, checked. Raises PrefillFailed."""
        about: Attributes = {"address": self.address, "tokens": len(wanted.tokens), "first_page": wanted.first}
        within = current_span()
        span = within.child("Prefill", about, "client") if within else None
        request = current()
        metadata = outgoing(Request(request.id if request else new_id(), span))
        self.running += 1
        error = ""
        try:
            async with contextlib.aclosing(self._received(wanted, metadata)) as runs:
                async for run in runs:
                    yield run
            self._failures, self._said = 0, ""
        except PrefillFailed as failed:
            error = failed.reason
            raise self._failed(failed) from None
        finally:
            self.running -= 1
            if span:
                span.end(error)

    async def _received(self, wanted: Wanted, metadata: Any) -> AsyncGenerator[PageRun, None]:
        call = self._stub.Prefill(_request(wanted, self._layout), metadata=metadata)
        try:
            header = await self._next(call)
            if header.WhichOneof("event") != "header":
                raise PrefillFailed("corrupt", "the answer has no header")
            self._same(header.header.layout)
            at, end = wanted.first, len(wanted.tokens) // self._layout.page_tokens
            while (reply := await self._next(call)).WhichOneof("event") == "pages":
                # Checksums of 1 MiB take half a millisecond; other threads run meanwhile.
                run = await asyncio.to_thread(run_from_wire, reply.pages, at, self._layout.page_bytes, end - at)
                at = run.end
                yield run
            if reply.WhichOneof("event") != "end" or at < end:
                raise PrefillFailed("cut", f"the pages ended at {at} of {end}")
        except Corrupt as error:
            raise PrefillFailed("corrupt", str(error)) from None
        except grpc.RpcError as error:
            raise _from_call(from_rpc(error)) from None
        finally:
            call.cancel()

    async def _next(self, call: Any) -> pb.PrefillResponse:
        """Returns the next message. Raises PrefillFailed if it takes too long, or there is none."""
        reading: asyncio.Task[Any] = asyncio.ensure_future(call.read())
        try:
            await asyncio.wait({reading}, timeout=self._seconds)
            if not reading.done():
                raise PrefillFailed("late", f"nothing came for {self._seconds:g} s")
            reply = reading.result()
        finally:
            reading.cancel()
        if reply is grpc.aio.EOF:
            raise PrefillFailed("cut", "the answer has no end")
        message: pb.PrefillResponse = reply
        return message

    def _same(self, layout: pb.PageLayout) -> None:
        difference = self._layout.difference(layout_from_wire(layout))
        if difference:
            raise PrefillFailed("mismatch", f"its pages are not those of this model: {difference}")

    def _failed(self, error: PrefillFailed) -> PrefillFailed:
        """Lets the worker rest if the failure is its own, and logs each kind of failure once."""
        if error.reason not in _HEALTHY:
            self._rests_until = self._clock() + min(_REST_LONGEST, _REST_FIRST * 2.0 ** min(self._failures, 10))
            self._failures += 1
        if error.reason != self._said and error.reason != "busy":
            self._said = error.reason
            log.warning("prefill at %s: %s: %s; prompts are processed here", self.address, error.reason, error)
        return error

    async def close(self) -> None:
        await self._channel.close()


class PrefillClient:
    """Implements PageSource with several PrefillWorkers. Raises ValueError for bad addresses or credentials."""

    def __init__(self, config: PrefillConfig, layout: PageLayout, credentials: Credentials | None = None) -> None:
        self.endpoints = [
            PrefillEndpoint(address, layout, config.seconds, credentials)
            for address in parse_addresses(config.addresses, "prefill")
        ]

    async def check(self) -> None:
        """Asks all workers once; those that do not answer, or have other pages, are logged and tried again later."""
        checks = (endpoint.check() for endpoint in self.endpoints)
        for failed in await asyncio.gather(*checks, return_exceptions=True):
            if failed is not None and not isinstance(failed, PrefillFailed):
                raise failed

    async def pages(self, wanted: Wanted) -> AsyncGenerator[PageRun, None]:
        """Yields the pages from the worker with the least to do; from another one if that refuses at once."""
        left = [endpoint for endpoint in self.endpoints if not endpoint.resting]
        error, came = PrefillFailed("unavailable", "all workers rest after failures"), False
        while left:
            endpoint = min(left, key=lambda each: each.running)
            left.remove(endpoint)
            try:
                async with contextlib.aclosing(endpoint.pages(wanted)) as runs:
                    async for run in runs:
                        came = True
                        yield run
                return
            except PrefillFailed as failed:
                error = failed
                if came or failed.reason not in _AT_ONCE:
                    break
        raise error

    async def close(self) -> None:
        await asyncio.gather(*(endpoint.close() for endpoint in self.endpoints))


def _request(wanted: Wanted, layout: PageLayout) -> pb.PrefillRequest:
    return pb.PrefillRequest(
        token_ids=wanted.tokens,
        first_page=wanted.first,
        layout=layout_to_wire(layout),
        adapter=wanted.adapter,
        adapter_revision=wanted.adapter_revision,
    )


def _from_call(error: TandemError) -> PrefillFailed:
    return PrefillFailed(_REASONS.get(error.code, "failed"), f"{error.code} {error.message}")
