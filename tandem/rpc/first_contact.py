"""The first call to a server: what it runs, or why it does not answer and what helps."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from tandem.rpc.channel import DRAFT, FUSED, TARGET
from tandem.rpc.credentials import Credentials
from tandem.rpc.endpoint_pool import parse_addresses
from tandem.rpc.generation_client import GenerationClient
from tandem.rpc.received_errors import TandemError
from tandem.speculation.errors import SILENT, Outcome

log = logging.getLogger("tandem.endpoints")

Answer = TypeVar("Answer")
Ask = Callable[[float], Awaitable[Answer]]

ANSWER_SECONDS = 10.0  # for a server to report its model
_PEER_SECONDS = 2.0
_ASK_AGAIN_SECONDS = 0.25
_MAY_START = ("", "UNKNOWN_HOST", "CONNECTION_REFUSED", "UNREACHABLE", "NOT_ANSWERING", "NO_GRPC")
"""Failure reasons of servers that may still be starting."""
_UNKNOWN = "UNKNOWN_HOST", "no machine has the name {host!r}: check its spelling, and this network"
_OTHER = "OTHER_PROTOCOL", "the server at {0} speaks no gRPC there, but perhaps HTTP: give the port of gRPC (--port)"
_CAUSES = {
    "DNS resolution failed": _UNKNOWN,
    "errors resolving": _UNKNOWN,
    "CERTIFICATE_VERIFY_FAILED": ("UNTRUSTED", "the certificate of the server at {0} is not accepted: see --tls_ca"),
    "WRONG_VERSION_NUMBER": ("NO_TLS", "the server at {0} speaks clear text, and this client TLS: leave out --tls_ca"),
    "http1.x server": _OTHER,
    "Failed parsing HTTP/2": _OTHER,
    "onnection refused": (
        "CONNECTION_REFUSED",
        "nothing listens at {0} (connection refused): start the server, or check host and port",
    ),
    "unreachable": ("UNREACHABLE", "{0} cannot be reached"),
}
"""Reason and message by gRPC's own words."""


async def first_of(
    asks: Mapping[str, Ask[Answer]],
    credentials: Credentials | None = None,
    timeout: float = ANSWER_SECONDS,
    wait_seconds: float = 0.0,
    service: str = "",
) -> tuple[str, Answer]:
    """Returns the first answer, waiting `wait_seconds` for servers that may be starting. Raises TandemError."""
    ends, waiting = time.monotonic() + wait_seconds, False
    while True:
        failures: list[TandemError] = []
        for address, ask in asks.items():
            left = ends - time.monotonic()
            try:
                return address, await ask(min(timeout, max(left, 1.0)) if wait_seconds else timeout)
            except TandemError as error:
                failures.append(explained(error, address, credentials, service))
        failure = together(failures)
        if time.monotonic() >= ends or not any(map(_may_start, failures)):
            if not wait_seconds and failure.reason in ("CONNECTION_REFUSED", "NOT_ANSWERING"):
                how = "--connect_seconds 60 (in Python: wait_seconds=60) waits for one that still starts"
                raise TandemError(failure.code, f"{failure.message}; {how}", reason=failure.reason)
            raise failure
        if not waiting:
            log.warning("%s; waiting up to %g s for it", failure.message, wait_seconds)
            waiting = True
        await asyncio.sleep(_ASK_AGAIN_SECONDS)


async def check_peers(addresses: str | None, credentials: Credentials, service: str) -> None:
    """Calls servers once before a model is loaded. Raises ValueError if waiting cannot help."""
    failures, listed = [], parse_addresses(addresses) if addresses else ()
    for address in listed:
        try:
            await service_at(address, credentials, _PEER_SECONDS, service)
        except TandemError as error:
            failures.append(explained(error, address, credentials, service))
    mistakes = [each for each in failures if each.outcome in SILENT and not _may_start(each)]
    if mistakes and len(mistakes) == len(listed):
        raise ValueError(together(mistakes).message)
    for each in failures:
        log.warning("%s; it is asked again when the models are loaded", each.message)


async def service_at(address: str, credentials: Credentials | None, seconds: float, service: str | None = None) -> str:
    """Returns `service`, or the first service that answers. Raises TandemError."""
    for each in (service,) if service else (TARGET, FUSED, DRAFT):
        async with GenerationClient.connect(address, each, credentials) as client:
            try:
                await client.model_info(seconds, wait=False)
            except TandemError as error:
                if error.outcome is not Outcome.NOT_OFFERED:
                    raise
                continue
            return each
    raise TandemError("UNIMPLEMENTED", "")


def explained(error: TandemError, address: str, credentials: Credentials | None, service: str = "") -> TandemError:
    """Adds cause and remedy to the error of a first call."""
    code, server, reason = error.code, f"the server at {address}", error.reason
    if address in error.message and reason:
        return error  # explained already
    if error.outcome is Outcome.NOT_OFFERED:
        none = "none of Tandem's services that generate: is it a health port or a prefill worker?"
        which = f"no {service}: ask for another service, or check the address" if service else none
        return TandemError(code, f"{server} has {which}", reason="NO_SUCH_SERVICE")
    if error.outcome is Outcome.DENIED:
        has_token = credentials is not None and credentials.token() is not None
        how = "check the token sent" if has_token else "give --token_file FILE (Python: Credentials(token_file=FILE))"
        return TandemError(code, f"{server} refuses this client: {error.message}; {how}", reason=reason)
    if reason or error.outcome not in SILENT:
        return error
    for words, (cause, message) in _CAUSES.items():
        if words in error.message:
            return TandemError(code, message.format(address, host=address.rpartition(":")[0]), reason=cause)
    if error.outcome is Outcome.LATE:
        late = f"{address} does not answer: a server that still starts, or hangs, or cannot be reached"
        return TandemError(code, late, reason="NOT_ANSWERING")
    speaks, words = "TLS" if credentials and credentials.ca else "clear text", error.message.rpartition(": ")[2]
    how = f"TLS or clear text differ (this client speaks {speaks}), it wants a certificate, or is no gRPC server"
    message = f"{address} takes connections, but answers no gRPC ({words}): {how}; see --tls_ca"
    return TandemError(code, message, reason="NO_GRPC")


def _may_start(error: TandemError) -> bool:
    return error.outcome in SILENT and error.reason in _MAY_START


def together(failures: list[TandemError]) -> TandemError:
    first = failures[0]
    if len(failures) == 1:
        return first
    all_of_them = "; ".join(each.message for each in failures)
    return TandemError(first.code, f"no server answers: {all_of_them}", reason=first.reason)
