"""Opens gRPC channels; maps services to stubs and messages."""

from __future__ import annotations

import functools
import os
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import grpc

from tandem.rpc.credentials import Credentials, pem_of
from tandem.rpc.received_errors import TandemError, from_rpc
from tandem.speculation.types import SpeculationStats
from tandem.v1 import (
    draft_worker_pb2,
    draft_worker_pb2_grpc,
    fused_speculative_server_pb2,
    fused_speculative_server_pb2_grpc,
    target_verifier_pb2,
    target_verifier_pb2_grpc,
)

TARGET, FUSED, DRAFT = "TargetVerifier", "FusedSpeculativeServer", "DraftWorker"
PREFILL = "PrefillWorker"  # does not generate: it has no place in the tables below

MESSAGES: dict[str, Any] = {TARGET: target_verifier_pb2, FUSED: fused_speculative_server_pb2, DRAFT: draft_worker_pb2}
STUBS: dict[str, Any] = {
    TARGET: target_verifier_pb2_grpc.TargetVerifierStub,
    FUSED: fused_speculative_server_pb2_grpc.FusedSpeculativeServerStub,
    DRAFT: draft_worker_pb2_grpc.DraftWorkerStub,
}

# gRPC itself retries nothing: a client that lost a session reopens it, at another server if it has one.
_OPTIONS = (
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.use_local_subchannel_pool", 1),
    # A server that was restarted is found again at once; by default a channel may wait for two minutes.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 250),
)
# A proxy set by the environment (http_proxy, grpc_proxy) could read clear text, tokens included, and would resolve
# "localhost" to its own machine. With TLS it sees nothing.
_NO_PROXY = (("grpc.enable_http_proxy", 0),)


Options = tuple[tuple[str, int | str], ...]


def open_channel(address: str, credentials: Credentials | None = None, more: Options = ()) -> grpc.aio.Channel:
    """Opens a channel to host:port, in clear text without a CA. Raises ValueError, or TandemError if forked."""
    check_process()
    given = credentials or Credentials()
    given.check(address)
    token = given.token()
    if given.ca is None:
        channel = grpc.aio.insecure_channel(address, options=(*_OPTIONS, *_NO_PROXY, *more))
    else:
        name = (("grpc.ssl_target_name_override", given.server_name),) if given.server_name else ()
        tls = grpc.ssl_channel_credentials(pem_of(given.ca), pem_of(given.key), pem_of(given.cert))
        channel = grpc.aio.secure_channel(address, tls, options=(*_OPTIONS, *name, *more))
    return channel if token is None else _Authorized(channel, token)


@functools.cache
def _first_process() -> int:
    return os.getpid()


def forked(process: int | None = None) -> bool:
    # gRPC's asyncio polls in a thread, which a forked child lacks; GRPC_ENABLE_FORK_SUPPORT does not help.
    return os.getpid() != (_first_process() if process is None else process)


def check_process(process: int | None = None) -> None:
    """Raises TandemError in a forked child, where calls would never end."""
    if forked(process):
        raise TandemError(
            "FAILED_PRECONDITION",
            "a client was used before this process was forked: start processes with"
            ' multiprocessing.get_context("spawn"), or fork before the first use and make the client in the child',
            reason="FORKED",
        )


class _Authorized:
    """A channel whose calls carry a token. gRPC's call credentials would need TLS even on loopback."""

    def __init__(self, channel: grpc.aio.Channel, token: Callable[[], str]) -> None:
        self._channel, self._token = channel, token

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._channel, name)
        return partial(self._authorized, found) if name in ("unary_unary", "unary_stream", "stream_stream") else found

    async def __aenter__(self) -> _Authorized:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._channel.close()

    def _authorized(self, make: Callable[..., Any], *method: Any, **coders: Any) -> Callable[..., Any]:
        call = make(*method, **coders)

        def with_token(*request: Any, metadata: Any = None, **options: Any) -> Any:
            authorization = ("authorization", f"Bearer {self._token()}")
            return call(*request, metadata=(*(metadata or ()), authorization), **options)

        return with_token


Message = TypeVar("Message", bound=Any)


def sent(message: Message, stats: SpeculationStats) -> Message:
    stats.bytes_up += message.ByteSize()
    return message


def received(message: Message, stats: SpeculationStats) -> Message:
    stats.bytes_down += message.ByteSize()
    return message


async def unary(
    method: Callable[..., Awaitable[Any]], request: Any, stats: SpeculationStats | None = None, **options: Any
) -> Any:
    """Returns the reply to `method` with gRPC's `options`. Raises TandemError."""
    if stats is not None:
        sent(request, stats)
    try:
        reply = await method(request, **options)
    except grpc.RpcError as error:
        raise from_rpc(error) from None
    return reply if stats is None else received(reply, stats)
