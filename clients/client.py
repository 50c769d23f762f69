"""Client: AsyncClient for code without an event loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType

from tandem.clients.async_client import CONNECT_SECONDS, AsyncClient
from tandem.clients.background_loop import BackgroundLoop
from tandem.clients.completion import Completion, Prompt, chunks_of, completion_of, request_of
from tandem.rpc.credentials import Credentials
from tandem.speculation.types import Chunk, ModelInfo, SamplingParams, SpeculationStats


class Client:
    """Asks Tandem servers for continuations, with methods that block. Threads may share a client.

    The arguments are AsyncClient's. Requests run on an event loop in a background thread, which `close` ends.
    """

    def __init__(
        self,
        endpoints: str | Sequence[str],
        *,
        service: str | None = None,
        credentials: Credentials | None = None,
        retry_seconds: float = 60.0,
    ) -> None:
        self._client = AsyncClient(endpoints, service=service, credentials=credentials, retry_seconds=retry_seconds)
        self._loop = BackgroundLoop("tandem-client")

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections. Requests under way end with a TandemError whose code is CANCELLED."""
        self._loop.close(self._client.close())

    @property
    def last_statistics(self) -> SpeculationStats | None:
        """Statistics of the request that completed last."""
        return self._client.last_statistics

    def model_info(self, timeout: float = CONNECT_SECONDS) -> ModelInfo:
        """Returns what the first server to answer runs. Raises TandemError."""
        return self._loop.run(self._client.model_info(timeout))

    def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        max_new_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        chat: bool = False,
        ignore_end_of_sequence: bool = False,
        speculation_length: int | None = None,
        rule: str = "agreement",
        logprobs: int | None = None,
        adapter: str = "",
        timeout: float | None = None,
    ) -> Completion:
        """Returns the whole continuation; AsyncClient.stream explains the arguments. Raises TandemError, ValueError."""
        request = request_of(
            prompt,
            sampling,
            max_new_tokens,
            stop,
            chat=chat,
            ignore_end_of_sequence=ignore_end_of_sequence,
            speculation_length=speculation_length,
            rule=rule,
            logprobs=logprobs,
            adapter=adapter,
        )
        return self._loop.run(completion_of(self._client.events(request, timeout)))

    def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        max_new_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        chat: bool = False,
        ignore_end_of_sequence: bool = False,
        speculation_length: int | None = None,
        rule: str = "agreement",
        logprobs: int | None = None,
        adapter: str = "",
        timeout: float | None = None,
    ) -> Iterator[Chunk]:
        """Yields chunks as they are committed; AsyncClient.stream explains the arguments. Leaving early cancels it."""
        request = request_of(
            prompt,
            sampling,
            max_new_tokens,
            stop,
            chat=chat,
            ignore_end_of_sequence=ignore_end_of_sequence,
            speculation_length=speculation_length,
            rule=rule,
            logprobs=logprobs,
            adapter=adapter,
        )
        return self._loop.iterate(chunks_of(self._client.events(request, timeout)))
