"""Measures the round trip from this machine to servers, as calls see it: `advise --ping`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.rpc.credentials import Credentials
from tandem.rpc.errors import TandemError
from tandem.rpc.first_contact import explained, service_at
from tandem.rpc.generation_client import GenerationClient

CALLS = 11
"""Odd, so that the median is one of them."""
ANSWER_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Reached:
    """The round trips to one server, in seconds: median, least and most. `failure`: why none was measured."""

    address: str
    service: str = ""
    rtt_s: float = 0.0
    least_s: float = 0.0
    most_s: float = 0.0
    failure: str = ""


async def reached(
    addresses: Sequence[str], credentials: Credentials | None = None, calls: int = CALLS
) -> list[Reached]:
    """Times `calls` calls of GetModelInfo at each server, one server after another, so that none delays another."""
    return [await _reached(address, credentials, calls) for address in addresses]


async def _reached(address: str, credentials: Credentials | None, calls: int) -> Reached:
    try:
        service = await service_at(address, credentials, ANSWER_SECONDS)
        async with GenerationClient.connect(address, service, credentials) as client:
            await client.model_info(ANSWER_SECONDS)  # which connects
            times = [await _timed(client) for _ in range(calls)]
    except TandemError as error:
        return Reached(address, failure=(await explained(error, address, credentials)).message)
    return Reached(address, service, statistics.median(times), min(times), max(times))


async def _timed(client: GenerationClient) -> float:
    began = time.perf_counter()
    await client.model_info(ANSWER_SECONDS, wait=False)
    return time.perf_counter() - began
