"""Finds out which server answers and what it runs. If none answers, says so at once, with the reason and what to do."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TypeVar

from tandem.rpc.channel import DRAFT, FUSED, TARGET
from tandem.rpc.credentials import Credentials
from tandem.rpc.endpoint_pool import parse_addresses
from tandem.rpc.errors import TandemError
from tandem.rpc.generation_client import GenerationClient
from tandem.rpc.reach import PASSING, obstacle
from tandem.speculation.outcomes import SILENT, Outcome
from tandem.speculation.types import ModelInfo

log = logging.getLogger("tandem.endpoints")

Answer = TypeVar("Answer")
Ask = Callable[[float], Awaitable[Answer]]

ANSWER_SECONDS = 10.0
"""How long a server may take to tell what it runs."""
_ASK_AGAIN_SECONDS = 0.25
_NONE = "none of Tandem's services that generate: is it an engine port, a health port or a prefill worker?"


async def first_of(
    asks: Mapping[str, Ask[Answer]],
    credentials: Credentials | None = None,
    timeout: float = ANSWER_SECONDS,
    wait_seconds: float = 0.0,
    service: str = "",
) -> tuple[str, Answer]:
    """Returns the first address in turn whose `ask` answers, and the answer. Raises TandemError.

    Each `ask` gets the seconds that it may take, and does not wait for a connection. If no server is there, that is
    said at once: raised, or logged while one that may still start is waited for, up to `wait_seconds`. `service`: the
    one that is asked for.
    """
    ends, waiting = time.monotonic() + wait_seconds, False
    while True:
        failures: list[TandemError] = []
        for address, ask in asks.items():
            left = ends - time.monotonic()
            try:
                return address, await ask(min(timeout, max(left, 1.0)) if wait_seconds else timeout)
            except TandemError as error:
                failures.append(await explained(error, address, credentials, service))
        if time.monotonic() >= ends or not any(map(_passing, failures)):
            raise together(failures) if wait_seconds else _with_a_way_to_wait(together(failures))
        if not waiting:
            log.warning("%s; waiting up to %g s for it", together(failures).message, wait_seconds)
            waiting = True
        await asyncio.sleep(_ASK_AGAIN_SECONDS)


async def model_at(
    client: GenerationClient, address: str, credentials: Credentials | None, wait_seconds: float, service: str
) -> ModelInfo:
    """Returns what the server at `address` runs. Raises TandemError, as `first_of`."""
    asks = {address: partial(client.model_info, wait=False)}
    return (await first_of(asks, credentials, wait_seconds=wait_seconds, service=service))[1]


async def foresee(addresses: str | None, credentials: Credentials) -> None:
    """Tells what stands in the way of calls to servers at `addresses`, before a model is loaded for them.

    Raises ValueError if no waiting can mend it.
    """
    found = [await obstacle(address, credentials) for address in parse_addresses(addresses)] if addresses else []
    hopeless = [each.message for each in found if each and each.reason not in PASSING]
    if found and len(hopeless) == len(found):
        raise ValueError("; ".join(hopeless))
    for each in found:
        if each:
            log.warning("%s; it is asked again when the models are loaded", each.message)


async def which_service(
    address: str,
    credentials: Credentials | None = None,
    timeout: float = ANSWER_SECONDS,
    wait_seconds: float = 0.0,
    service: str | None = None,
) -> str:
    """Returns the Tandem service that answers at `address`, `service` if given. Raises TandemError, as `first_of`."""

    async def ask(seconds: float) -> str:
        return await service_at(address, credentials, seconds, service)

    return (await first_of({address: ask}, credentials, timeout, wait_seconds, service or ""))[1]


async def service_at(address: str, credentials: Credentials | None, seconds: float, service: str | None = None) -> str:
    """Asks once which service answers. Raises TandemError, not `explained` yet."""
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
    """Returns the error of a first call, with what stands in its way and what to do."""
    code, said = error.code, f"the server at {address}"
    if error.message.startswith(said):
        return error  # it is explained already
    if error.outcome is Outcome.NOT_OFFERED:
        which = f"no {service}: ask for another service, or check the address" if service else _NONE
        return TandemError(code, f"{said} has {which}", reason="NO_SUCH_SERVICE")
    if error.outcome is Outcome.DENIED:
        shown = credentials is not None and credentials.token() is not None
        how = "check the token sent" if shown else "give --token_file FILE (in Python: Credentials(token_file=FILE))"
        return TandemError(code, f"{said} refuses this client: {error.message}; {how}", reason=error.reason)
    if error.reason or error.outcome not in SILENT:
        return error
    found = await obstacle(address, credentials)
    if found is None:
        return TandemError(code, f"no answer from {said}: {error.message}")
    return TandemError(code, found.message, reason=found.reason)


def _with_a_way_to_wait(error: TandemError) -> TandemError:
    """Adds how to wait for a server, where one may be starting."""
    if error.reason not in ("CONNECTION_REFUSED", "NOT_ANSWERING"):
        return error
    how = "--connect_seconds 60 (in Python: wait_seconds=60) waits for one that still starts"
    return TandemError(error.code, f"{error.message}; {how}", reason=error.reason)


def _passing(error: TandemError) -> bool:
    """Whether a server that starts may still answer."""
    return error.outcome in SILENT and error.reason in ("", *PASSING)


def together(failures: list[TandemError]) -> TandemError:
    """Returns the only failure, or one that names them all."""
    first = failures[0]
    if len(failures) == 1:
        return first
    said = "; ".join(each.message for each in failures)
    return TandemError(first.code, f"no server answers: {said}", reason=first.reason)
