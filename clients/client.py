"""Client: AsyncClient without an event loop."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from tandem.clients.async_client import AsyncClient
from tandem.clients.background_loop import BackgroundLoop
from tandem.rpc.credentials import Credentials
from tandem.speculation.types import SpeculationStats

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def _waiting(
    method: Callable[Concatenate[AsyncClient, Arguments], Coroutine[Any, Any, Result]],
) -> Callable[Concatenate[Client, Arguments], Result]:
    # Keeps signature and docstring for help().

    @functools.wraps(method)
    def wait(self: Client, *args: Arguments.args, **named: Arguments.kwargs) -> Result:
        return self._loop.run(method(self._client, *args, **named))

    return wait


def _iterating(
    method: Callable[Concatenate[AsyncClient, Arguments], AsyncGenerator[Result, None]],
) -> Callable[Concatenate[Client, Arguments], Iterator[Result]]:
    # Leaving early cancels the request.

    @functools.wraps(method)
    def iterate(self: Client, *args: Arguments.args, **named: Arguments.kwargs) -> Iterator[Result]:
        return self._loop.iterate(method(self._client, *args, **named))

    said = inspect.signature(method).replace(return_annotation="Iterator[Chunk]")
    iterate.__signature__ = said  # type: ignore[attr-defined]  # for help()
    return iterate


class Client:
    """AsyncClient with blocking methods, on a background thread until `close`. Threads may share it."""

    def __init__(
        self,
        endpoints: str | Sequence[str],
        *,
        service: str | None = None,
        credentials: Credentials | None = None,
        retry_seconds: float = 60.0,
        wait_seconds: float = 0.0,
    ) -> None:
        self._client = AsyncClient(
            endpoints, service=service, credentials=credentials, retry_seconds=retry_seconds, wait_seconds=wait_seconds
        )
        self._loop = BackgroundLoop("tandem-client")

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections; running requests end with CANCELLED."""
        self._loop.close(self._client.close())

    @property
    def last_statistics(self) -> SpeculationStats | None:
        return self._client.last_statistics

    model_info = _waiting(AsyncClient.model_info)
    generate = _waiting(AsyncClient.generate)
    stream = _iterating(AsyncClient.stream)
