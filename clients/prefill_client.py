"""Fetches pages from PrefillWorkers."""

from __future__ import annotations

import asyncio
import logging
import time
import zlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc

from tandem.engine.prefill import MIN_TOKENS, PageLayout, PageRun, PrefillFailed
from tandem.rpc.channel import open_channel
from tandem.rpc.credentials import Credentials
from tandem.rpc.endpoint_pool import parse_addresses
from tandem.rpc.received_errors import from_rpc
from tandem.rpc.request_context import outgoing
from tandem.rpc.wire import printable_fields
from tandem.runners.capabilities import PAGE
from tandem.speculation.errors import Outcome
from tandem.v1 import prefill_worker_pb2 as pb
from tandem.v1.prefill_worker_pb2_grpc import PrefillWorkerStub

log = logging.getLogger("tandem.prefill")

SECONDS = 5.0
REST_SECONDS = 5.0
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
_AT_ONCE = ("busy", "mismatch", "unavailable")  # try another worker, before the first page
_HEALTHY = ("busy", "refused")  # the worker does not rest

Put = Callable[[PageRun], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """`min_tokens`: shorter prompts are local. `seconds`: wait for the next pages and for a slot."""

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
    """A channel to one worker, which rests for REST_SECONDS after its failures."""

    def __init__(
        self, address: str, layout: PageLayout, seconds: float, credentials: Credentials | None = None
    ) -> None:
        self.address, self._layout, self._seconds = address, layout, seconds
        most = max(_MESSAGE_BYTES, layout.page_bytes + 2**16)
        # A name may stand for many workers: calls go to them in turn.
        options = (("grpc.max_receive_message_length", most), ("grpc.lb_policy_name", "round_robin"))
        self._channel = open_channel(address, credentials, options)
        self._stub: Any = PrefillWorkerStub(self._channel)
        self.running, self.rests_until = 0, 0.0

    async def check(self) -> None:
        try:
            reply = await self._stub.GetModelInfo(pb.PrefillWorkerGetModelInfoRequest(), timeout=self._seconds)
        except grpc.RpcError as error:
            self._failed(_from_call(error))
            return
        if difference := self._layout.difference(layout_from_wire(reply.layout)):
            self._failed(PrefillFailed("mismatch", f"its pages are not those of this model: {difference}"))

    async def fetch(self, tokens: tuple[int, ...], first: int, adapter: tuple[str, str], put: Put) -> None:
        request = pb.PrefillRequest(
            token_ids=tokens,
            first_page=first,
            layout=layout_to_wire(self._layout),
            adapter=adapter[0],
            adapter_revision=adapter[1],
        )
        call = self._stub.Prefill(request, metadata=outgoing())
        at, end = first, len(tokens) // PAGE
        self.running += 1
        try:
            while at < end:
                reply = await self._next(call)
                if reply is grpc.aio.EOF:
                    raise PrefillFailed("cut", f"the pages ended at {at} of {end}")
                run = run_from_wire(reply.pages, at, self._layout.page_bytes, end - at)
                await put(run)
                at = run.end
        except (PrefillFailed, grpc.RpcError) as error:
            raise self._failed(_from_call(error) if isinstance(error, grpc.RpcError) else error) from None
        finally:
            self.running -= 1
            call.cancel()

    async def _next(self, call: Any) -> Any:
        reading: asyncio.Task[Any] = asyncio.ensure_future(call.read())
        try:
            if not (await asyncio.wait({reading}, timeout=self._seconds))[0]:
                raise PrefillFailed("late", f"nothing came for {self._seconds:g} s")
            return reading.result()
        finally:
            reading.cancel()

    def _failed(self, error: PrefillFailed) -> PrefillFailed:
        if error.reason not in _HEALTHY:
            self.rests_until = time.monotonic() + REST_SECONDS
            log.warning("prefill at %s: %s: %s; prompts are processed here", self.address, error.reason, error)
        return error

    async def close(self) -> None:
        await self._channel.close()


class PrefillClient:
    def __init__(self, config: PrefillConfig, layout: PageLayout, credentials: Credentials | None = None) -> None:
        self.endpoints = [
            PrefillEndpoint(address, layout, config.seconds, credentials)
            for address in parse_addresses(config.addresses, "prefill")
        ]

    async def check(self) -> None:
        await asyncio.gather(*(endpoint.check() for endpoint in self.endpoints))

    async def fetch(self, tokens: tuple[int, ...], first: int, adapter: tuple[str, str], put: Put) -> None:
        """Fetches from the least busy worker, or the next one if refused at once."""
        came = False

        async def noted(run: PageRun) -> None:
            nonlocal came
            came = True
            await put(run)

        failure = PrefillFailed("unavailable", "all workers rest after failures")
        awake = [endpoint for endpoint in self.endpoints if endpoint.rests_until <= time.monotonic()]
        for endpoint in sorted(awake, key=lambda each: each.running):
            try:
                return await endpoint.fetch(tokens, first, adapter, noted)
            except PrefillFailed as error:
                failure = error
                if came or error.reason not in _AT_ONCE:
                    break
        raise failure

    async def close(self) -> None:
        await asyncio.gather(*(endpoint.close() for endpoint in self.endpoints))


def _from_call(error: grpc.RpcError) -> PrefillFailed:
    found = from_rpc(error)
    return PrefillFailed(_REASONS.get(found.outcome, "failed"), f"{found.code} {found.message}")


LAYOUT_FIELDS = ("weights_revision", "dtype", "backend", "format", "page_tokens", "page_bytes")


def layout_to_wire(layout: PageLayout) -> pb.PageLayout:
    return pb.PageLayout(**{name: getattr(layout, name) for name in LAYOUT_FIELDS})


def layout_from_wire(message: pb.PageLayout) -> PageLayout:
    return PageLayout(**printable_fields(message, LAYOUT_FIELDS))


def run_to_wire(run: PageRun) -> pb.KvPages:
    return pb.KvPages(first_page=run.first, data=b"".join(run.pages), checksums=map(zlib.crc32, run.pages))


def run_from_wire(message: pb.KvPages, first: int, page_bytes: int, most: int) -> PageRun:
    """Returns 1 to `most` pages from `first` on. Raises PrefillFailed."""
    data, count = message.data, len(message.checksums)
    if message.first_page != first:
        raise PrefillFailed("corrupt", f"page {message.first_page} came instead of page {first}")
    if not 1 <= count <= most:
        raise PrefillFailed("corrupt", f"{count} pages came, where 1 to {most} are missing")
    if len(data) != count * page_bytes:
        raise PrefillFailed("corrupt", f"{count} pages came in {len(data)} bytes, and a page has {page_bytes}")
    pages = tuple(data[at : at + page_bytes] for at in range(0, len(data), page_bytes))
    for number, (page, checksum) in enumerate(zip(pages, message.checksums, strict=True), first):
        if zlib.crc32(page) != checksum:
            raise PrefillFailed("corrupt", f"page {number} came with another checksum")
    return PageRun(first, pages)
