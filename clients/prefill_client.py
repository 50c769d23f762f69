"""Fetches the pages of prompts from PrefillWorkers: implements the engine's PageSource over gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import grpc

from tandem.clients.page_wire import Corrupt, layout_from_wire, layout_to_wire, run_from_wire
from tandem.engine.page_copies import PageLayout, PageRun
from tandem.engine.prefill_pace import SLOWER, Pace
from tandem.engine.remote_prefill import MIN_TOKENS
from tandem.engine.transfers import PrefillFailed, Wanted
from tandem.rpc.channel import PREFILL, open_channel
from tandem.rpc.credentials import Credentials
from tandem.rpc.endpoint_pool import parse_addresses
from tandem.rpc.errors import TandemError, from_rpc
from tandem.rpc.first_contact import explained
from tandem.rpc.request_context import Attributes, Request, current, current_span, new_id, outgoing
from tandem.rpc.wire_checks import MOST_NAME
from tandem.runners.pages import PAGE
from tandem.speculation.outcomes import Outcome
from tandem.speculation.retry import doubled
from tandem.v1 import prefill_worker_pb2 as pb
from tandem.v1.prefill_worker_pb2_grpc import PrefillWorkerStub

log = logging.getLogger("tandem.prefill")

SECONDS = 5.0
_SPARE = 0.2
"""Slack of a transfer's pace (see Pace), as a share of the time limit for the next pages."""
_REST_FIRST, _REST_LONGEST = 0.5, 30.0
_MESSAGE_BYTES = 4 * 2**20
_REASONS = {
    Outcome.GONE: "unavailable",
    Outcome.LATE: "late",
    Outcome.FULL: "busy",
    Outcome.UNFIT: "mismatch",
    Outcome.REFUSED: "refused",
    Outcome.DENIED: "refused",
    Outcome.NOT_OFFERED: "refused",
}
_AT_ONCE = ("busy", "mismatch", "unavailable")
"""Failures that are known at once: another worker is asked, if no page has come yet."""
_HEALTHY = ("busy", "refused")
"""Failures after which the worker is still taken to be healthy."""


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
        self.address, self._layout, self._seconds, self.clock = address, layout, seconds, clock
        most = max(_MESSAGE_BYTES, layout.page_bytes + 2**16)
        # A name may stand for many workers: calls go to them in turn.
        options = (("grpc.max_receive_message_length", most), ("grpc.lb_policy_name", "round_robin"))
        self._channel, self._credentials = open_channel(address, credentials, options), credentials
        self._stub: Any = PrefillWorkerStub(self._channel)
        self._thread = ThreadPoolExecutor(1, "pages")
        self.running = 0
        self.failures, self.rests_until, self._said = 0, 0.0, ""

    @property
    def resting(self) -> bool:
        return self.clock() < self.rests_until

    async def check(self) -> None:
        """Asks for the worker's layout, and rests if it is not ours. Raises PrefillFailed."""
        try:
            reply = await self._stub.GetModelInfo(pb.PrefillWorkerGetModelInfoRequest(), timeout=self._seconds)
            self._same(reply.layout)
        except grpc.RpcError as error:
            why = await explained(from_rpc(error), self.address, self._credentials, PREFILL)
            raise self.failed(_from_call(why)) from None
        except PrefillFailed as error:
            raise self.failed(error) from None

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
            self.failures, self._said = 0, ""
        except PrefillFailed as failed:
            error = failed.reason
            raise self.failed(failed) from None
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
            if len(header.header.instance) > MOST_NAME:
                raise Corrupt(f"a name of {len(header.header.instance)} characters")
            at, end = wanted.first, len(wanted.tokens) // self._layout.page_tokens
            pace = Pace(wanted.in_place, _SPARE * self._seconds)
            while (reply := await self._next(call, pace)).WhichOneof("event") == "pages":
                # Checksums of 1 MiB take half a millisecond; other threads run meanwhile.
                asked = reply.pages, at, self._layout.page_bytes, end - at
                run = await asyncio.get_running_loop().run_in_executor(self._thread, run_from_wire, *asked)
                at = run.end
                pace.came(len(run.pages), self.clock())
                yield replace(run, source=f"{self.address} {header.header.instance}")
            if reply.WhichOneof("event") != "end" or at < end:
                raise PrefillFailed("cut", f"the pages ended at {at} of {end}")
        except Corrupt as error:
            raise PrefillFailed("corrupt", str(error)) from None
        except grpc.RpcError as error:
            raise _from_call(from_rpc(error)) from None
        finally:
            call.cancel()

    async def _next(self, call: Any, pace: Pace | None = None) -> pb.PrefillResponse:
        """Returns the next message. Raises PrefillFailed if it takes too long, or there is none."""
        left = pace.left(self.clock()) if pace else math.inf
        reading: asyncio.Task[Any] = asyncio.ensure_future(call.read())
        try:
            await asyncio.wait({reading}, timeout=max(0.0, min(left, self._seconds)))
            if not reading.done() and left < self._seconds:
                raise PrefillFailed("slow", f"its pages take more than {SLOWER:g} times as long as here")
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

    def failed(self, error: PrefillFailed) -> PrefillFailed:
        """Lets the worker rest if the failure is its own, and logs each kind of failure once."""
        if error.reason not in _HEALTHY:
            wrong = error.reason == "wrong"
            rest = _REST_LONGEST if wrong else doubled(_REST_FIRST, _REST_LONGEST, self.failures)
            self.rests_until = self.clock() + rest
            self.failures += 1
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

    def found_wrong(self, source: str, error: PrefillFailed) -> None:
        for endpoint in self.endpoints:
            if source.startswith(f"{endpoint.address} "):
                endpoint.failed(error)

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
    return PrefillFailed(_REASONS.get(error.outcome, "failed"), f"{error.code} {error.message}")
