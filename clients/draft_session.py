"""DraftSession: distributed speculation with the caller's drafter."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from tandem.clients.background_loop import BackgroundLoop
from tandem.clients.completion import (
    Completion,
    Events,
    Prompt,
    check_connecting,
    chunks_of,
    completion_of,
    explained,
    request_of,
)
from tandem.engine.generator import Generator
from tandem.rpc.channel import TARGET
from tandem.rpc.credentials import Credentials
from tandem.rpc.endpoint_pool import parse_addresses
from tandem.rpc.received_errors import TandemError
from tandem.rpc.remote_session import RemoteSession
from tandem.rpc.verifier_client import VerifierClient
from tandem.rpc.verify_stream import RemoteVerifier
from tandem.speculation.drafters import Drafter
from tandem.speculation.errors import InvalidField, WrongType
from tandem.speculation.loop import Rounds
from tandem.speculation.request import RequestOptions
from tandem.speculation.rounds import DraftedRounds, OutOfStep
from tandem.speculation.stopping import TextStream
from tandem.speculation.types import (
    Chunk,
    Draft,
    GenerationRequest,
    LengthPlan,
    ModelInfo,
    SamplingParams,
    SpeculationStats,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack  # which Python has from 3.11 on

USUAL_LENGTH = 4  # default draft tokens per round


class OwnDrafter(Protocol):
    """The caller's drafter; wrong proposals cost time only."""

    def propose(self, tokens: Sequence[int], k: int) -> Sequence[int]:
        """Returns at most `k` token ids that may follow all `tokens`. May block."""


class OwnTokenizer(Protocol):
    """The caller's tokenizer, such as one of transformers, with the target's ids."""

    def encode(self, text: str) -> Sequence[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


class DraftSession:
    """Drafts with the caller's `drafter` and verifies at a TargetVerifier. Threads may share it. Raises TandemError.

        class Repeat:
            def propose(self, tokens, k):
                return tokens[-1:] * k

        with DraftSession("localhost:50051", Repeat()) as session:
            print(session.generate([1, 2, 3], max_new_tokens=20).token_ids)

    `target`: "HOST:PORT", or several with commas and one model: a failed verifier's request continues at the next.
    `tokenizer`: for text. `speculation_length`: draft tokens per round. Times as those of AsyncClient.
    """

    def __init__(
        self,
        target: str,
        drafter: OwnDrafter,
        *,
        tokenizer: OwnTokenizer | None = None,
        speculation_length: int | None = None,
        credentials: Credentials | None = None,
        retry_seconds: float = 60.0,
        wait_seconds: float = 0.0,
    ) -> None:
        target = check_connecting(target, TARGET, credentials, retry_seconds, wait_seconds, "target")
        parse_addresses(target, "target")
        if not callable(getattr(drafter, "propose", None)):
            raise WrongType("drafter", "an object with a method propose(tokens, k)", drafter)
        (credentials or Credentials()).check(target)
        self._drafter, self._tokenizer = drafter, tokenizer
        self._loop = BackgroundLoop("tandem-draft-session")
        try:
            self._client, self.target = self._loop.run(_connected(target, retry_seconds, credentials, wait_seconds))
            self._length = _checked_length(speculation_length, self.target)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> DraftSession:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections; running requests end with CANCELLED."""
        self._loop.close(self._close())

    async def _close(self) -> None:
        if client := getattr(self, "_client", None):  # none if connecting failed
            await client.close()

    @explained
    def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        max_new_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        logprobs: int | None = None,
        adapter: str = "",
        timeout: float | None = None,
    ) -> Completion:
        """Returns the whole continuation."""
        options: RequestOptions = {"max_new_tokens": max_new_tokens, "logprobs": logprobs, "adapter": adapter}
        return self._loop.run(completion_of(self._events(prompt, sampling, stop, timeout, **options)))

    @explained
    def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        max_new_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        logprobs: int | None = None,
        adapter: str = "",
        timeout: float | None = None,
    ) -> Iterator[Chunk]:
        """Yields chunks as they are committed; leaving early frees the slot."""
        options: RequestOptions = {"max_new_tokens": max_new_tokens, "logprobs": logprobs, "adapter": adapter}
        return self._loop.iterate(chunks_of(self._events(prompt, sampling, stop, timeout, **options)))

    def _events(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None,
        stop: str | Sequence[str],
        timeout: float | None,
        **options: Unpack[RequestOptions],
    ) -> Events:
        if self._tokenizer is None and (isinstance(prompt, str) or stop):
            raise InvalidField("tokenizer", "text prompts and stop strings need one; pass tokenizer= to DraftSession")
        deadline = None if timeout is None else time.monotonic() + timeout
        options["speculation_length"] = self._length
        request = request_of(prompt, sampling, stop, timeout, deadline, **options)

        def rounds(request: GenerationRequest, stats: SpeculationStats) -> Rounds:
            verifier = RemoteVerifier(RemoteSession(self._client, request.of_models, stats), stats)
            return DraftedRounds(verifier, _Drafter(self._drafter, self.target.vocab_size), stats=stats)

        return _in_step(Generator(self.target, _Tokenizer(self._tokenizer, self.target), rounds).generate(request))


async def _in_step(events: Events) -> Events:
    """Yields the events. Raises TandemError if the target keeps other tokens than were committed."""
    try:
        async for event in events:
            yield event
    except OutOfStep as error:
        raise TandemError("ABORTED", str(error)) from None


class _Drafter(Drafter):
    def __init__(self, drafter: OwnDrafter, vocab_size: int) -> None:
        self._drafter, self._vocab_size = drafter, vocab_size

    async def propose(self, tokens: Sequence[int], plan: LengthPlan) -> Draft:
        """Cuts the draft before an id outside the vocabulary. Raises InvalidField if it has over `plan.k` tokens."""
        began, k = time.perf_counter(), plan.k
        proposed = [int(token) for token in await asyncio.to_thread(self._drafter.propose, tuple(tokens), k)]
        if len(proposed) > k:
            raise InvalidField("propose", f"returned {len(proposed)} tokens, but at most {k} were requested")
        unknown = (i for i, token in enumerate(proposed) if not 0 <= token < self._vocab_size)
        return Draft(tuple(proposed[: next(unknown, k)]), compute_seconds=time.perf_counter() - began)


class _Tokenizer:
    def __init__(self, tokenizer: OwnTokenizer | None, target: ModelInfo) -> None:
        self._tokenizer = tokenizer
        self.sha256, self.vocab_size = target.tokenizer_sha256, target.vocab_size
        self.end_of_sequence_ids = target.end_of_sequence_ids

    def encode(self, text: str, chat: bool) -> list[int]:
        assert self._tokenizer is not None, "text needs a tokenizer"
        return [int(token) for token in self._tokenizer.encode(text)]

    def stream(self) -> TextStream:
        return TextStream() if self._tokenizer is None else _Text(self._tokenizer)


class _Text(TextStream):
    # Decoding all tokens again is right for any tokenizer.

    def __init__(self, tokenizer: OwnTokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._shown = 0

    def push(self, token: int) -> str:
        self._tokens.append(token)
        text = self._tokenizer.decode(self._tokens)
        return "" if text.endswith("\N{REPLACEMENT CHARACTER}") else self._fresh(text)

    def flush(self) -> str:
        return self._fresh(self._tokenizer.decode(self._tokens)) if self._tokens else ""

    def _fresh(self, text: str) -> str:
        fresh, self._shown = text[self._shown :], len(text)
        return fresh


async def _connected(
    target: str, retry_seconds: float, credentials: Credentials | None, seconds: float
) -> tuple[VerifierClient, ModelInfo]:
    client = VerifierClient(target, "", retry_seconds=retry_seconds, credentials=credentials)
    try:
        return client, await client.model_info(seconds)
    except BaseException:
        with contextlib.suppress(Exception):
            await client.close()
        raise


def _checked_length(requested: int | None, target: ModelInfo) -> int:
    most = target.max_speculation_length
    if requested is None:
        return min(USUAL_LENGTH, most)
    if not isinstance(requested, int):
        raise WrongType("speculation_length", "an integer from 0 on, or None", requested)
    if not 0 <= requested <= most:
        raise InvalidField("speculation_length", f"{requested} is outside 0 to {most}, the target's maximum")
    return requested
