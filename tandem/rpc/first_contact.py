"""The first call to a server: what it runs, or why it does not answer and what helps."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TypeVar

from tandem.rpc.channel import DRAFT, FUSED, TARGET
from tandem.rpc.credentials import Credentials
from tandem.rpc.endpoint_pool import parse_addresses
from tandem.rpc.errors import TandemError
from tandem.rpc.generation_client import GenerationClient
from tandem.speculation.errors import SILENT, Outcome
from tandem.speculation.types import ModelInfo

log = logging.getLogger("tandem.endpoints")

Answer = TypeVar("Answer")
Ask = Callable[[float], Awaitable[Answer]]

ANSWER_SECONDS = 10.0  # for a server to report its model
_CONNECT_SECONDS = 2.0
_ASK_AGAIN_SECONDS = 0.25
_NONE = "none of Tandem's services that generate: is it a health port or a prefill worker?"

_MAY_START = ("", "UNKNOWN_HOST", "CONNECTION_REFUSED", "UNREACHABLE", "NOT_ANSWERING", "NO_GRPC")
"""Failure reasons of servers that may still be starting."""
_OTHER = "OTHER_PROTOCOL", "the server at {} speaks no gRPC there, but perhaps HTTP: give the port of gRPC (--port)"
# gRPC's own words for mistakes that no waiting mends: their reason, and what to do.
_MISTAKES = {
    "CERTIFICATE_VERIFY_FAILED": ("UNTRUSTED", "the certificate of the server at {} is not accepted: see --tls_ca"),
    "WRONG_VERSION_NUMBER": ("NO_TLS", "the server at {} speaks clear text, and this client TLS: leave out --tls_ca"),
    "http1.x server": _OTHER,
    "Failed parsing HTTP/2": _OTHER,
}


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
                failures.append(await explained(error, address, credentials, service))
        if time.monotonic() >= ends or not any(map(_may_start, failures)):
            raise together(failures) if wait_seconds else _with_a_way_to_wait(together(failures))
        if not waiting:
            log.warning("%s; waiting up to %g s for it", together(failures).message, wait_seconds)
            waiting = True
        await asyncio.sleep(_ASK_AGAIN_SECONDS)


async def model_at(
    client: GenerationClient, address: str, credentials: Credentials | None, wait_seconds: float, service: str
) -> ModelInfo:
    asks = {address: partial(client.model_info, wait=False)}
    return (await first_of(asks, credentials, wait_seconds=wait_seconds, service=service))[1]


async def check_peers(addresses: str | None, credentials: Credentials, service: str) -> None:
    """Calls servers once before a model is loaded. Raises ValueError if waiting cannot help."""
    failures, listed = [], parse_addresses(addresses) if addresses else ()
    for address in listed:
        try:
            await service_at(address, credentials, _CONNECT_SECONDS, service)
        except TandemError as error:
            failures.append(await explained(error, address, credentials, service))
    mistakes = [each for each in failures if each.outcome in SILENT and not _may_start(each)]
    if mistakes and len(mistakes) == len(listed):
        raise ValueError(together(mistakes).message)
    for each in failures:
        log.warning("%s; it is asked again when the models are loaded", each.message)


async def which_service(
    address: str,
    credentials: Credentials | None = None,
    timeout: float = ANSWER_SECONDS,
    wait_seconds: float = 0.0,
    service: str | None = None,
) -> str:
    async def ask(seconds: float) -> str:
        return await service_at(address, credentials, seconds, service)

    return (await first_of({address: ask}, credentials, timeout, wait_seconds, service or ""))[1]


async def service_at(address: str, credentials: Credentials | None, seconds: float, service: str | None = None) -> str:
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


async def explained(
    error: TandemError, address: str, credentials: Credentials | None, service: str = ""
) -> TandemError:
    """Adds cause and remedy to the error of a first call."""
    code, server = error.code, f"the server at {address}"
    if address in error.message and error.reason:
        return error  # explained already
    if error.outcome is Outcome.NOT_OFFERED:
        which = f"no {service}: ask for another service, or check the address" if service else _NONE
        return TandemError(code, f"{server} has {which}", reason="NO_SUCH_SERVICE")
    if error.outcome is Outcome.DENIED:
        has_token = credentials is not None and credentials.token() is not None
        how = "check the token sent" if has_token else "give --token_file FILE (Python: Credentials(token_file=FILE))"
        return TandemError(code, f"{server} refuses this client: {error.message}; {how}", reason=error.reason)
    if error.reason or error.outcome not in SILENT:
        return error
    reason, message = await _cause(error, address, credentials)
    return TandemError(code, message, reason=reason)


async def _cause(error: TandemError, address: str, credentials: Credentials | None) -> tuple[str, str]:
    # One plain connect tells more than gRPC.
    host, _, port = address.rpartition(":")
    for words, (reason, message) in _MISTAKES.items():
        if words in error.message:
            return reason, message.format(address)
    unknown = "UNKNOWN_HOST", f"no machine has the name {host!r}: check its spelling, and this network"
    if "DNS resolution failed" in error.message:
        return unknown
    connecting = asyncio.create_task(asyncio.open_connection(host.strip("[]"), int(port)), name="first contact")
    try:
        await asyncio.wait((connecting,), timeout=_CONNECT_SECONDS)
        if not connecting.done():
            return "UNREACHABLE", f"{address} cannot be reached: no answer within {_CONNECT_SECONDS:g} s"
        connecting.result()[1].close()
    except (socket.gaierror, UnicodeError):
        return unknown
    except ConnectionRefusedError:
        how = "start the server, or check host and port"
        return "CONNECTION_REFUSED", f"nothing listens at {address} (connection refused): {how}"
    except OSError as failed:
        return "UNREACHABLE", f"{address} cannot be reached: {failed.strerror or 'no answer'}"
    finally:
        connecting.cancel()
    if error.outcome is Outcome.LATE:
        return "NOT_ANSWERING", f"{address} takes connections and does not answer: a server that still starts, or hangs"
    speaks, said = "TLS" if credentials and credentials.ca else "clear text", error.message.rpartition(": ")[2]
    how = f"TLS or clear text differ (this client speaks {speaks}), it wants a certificate, or is no gRPC server"
    return "NO_GRPC", f"{address} takes connections, but answers no gRPC ({said}): {how}; see --tls_ca"


def _with_a_way_to_wait(error: TandemError) -> TandemError:
    if error.reason not in ("CONNECTION_REFUSED", "NOT_ANSWERING"):
        return error
    how = "--connect_seconds 60 (in Python: wait_seconds=60) waits for one that still starts"
    return TandemError(error.code, f"{error.message}; {how}", reason=error.reason)


def _may_start(error: TandemError) -> bool:
    return error.outcome in SILENT and error.reason in _MAY_START


def together(failures: list[TandemError]) -> TandemError:
    first = failures[0]
    if len(failures) == 1:
        return first
    all_of_them = "; ".join(each.message for each in failures)
    return TandemError(first.code, f"no server answers: {all_of_them}", reason=first.reason)
