"""The public API's requests and completions."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from tandem.clients.arguments import check_request
from tandem.clients.messages import chat_of
from tandem.speculation.request import RequestOptions, members
from tandem.speculation.types import (
    SAMPLING_FIELDS,
    Chunk,
    FinishReason,
    GenerationEnd,
    GenerationRequest,
    SamplingParams,
    SpeculationStats,
    TokenLogprobs,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack  # which Python has from 3.11 on

Prompt: TypeAlias = str | Sequence[int]  # text or token ids

Events: TypeAlias = AsyncGenerator[Chunk | GenerationEnd, None]


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished continuation. If requested: `logprobs`, one per token; `receipt`, signed JSON."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    output_tokens: int
    statistics: SpeculationStats
    logprobs: tuple[TokenLogprobs, ...] = ()
    receipt: str = ""


async def completion_of(events: Events) -> Completion:
    tokens: list[int] = []
    text: list[str] = []
    logprobs: list[TokenLogprobs] = []
    end: GenerationEnd | None = None
    async with contextlib.aclosing(events):
        async for event in events:
            if isinstance(event, GenerationEnd):
                end = event
            else:
                tokens += event.token_ids
                text.append(event.text)
                logprobs += event.logprobs
    assert end is not None, "a generation ends with a GenerationEnd"
    return Completion(
        "".join(text),
        tuple(tokens),
        end.finish_reason,
        end.prompt_tokens,
        end.output_tokens,
        end.stats,
        tuple(logprobs),
        end.receipt,
    )


async def chunks_of(events: Events) -> AsyncGenerator[Chunk, None]:
    async with contextlib.aclosing(events):
        async for event in events:
            if isinstance(event, Chunk):
                yield event


def request_of(
    prompt: Prompt | None,
    sampling: SamplingParams | None,
    stop: str | Sequence[str],
    timeout: float | None = None,
    deadline: float | None = None,
    **options: Unpack[RequestOptions],
) -> GenerationRequest:
    """Builds a request; `sampling` None: the server's defaults. Raises InvalidField, a TandemError."""
    check_request(prompt, sampling, stop, timeout, options)
    given: dict[str, Any] = {**options, **members(options), "messages": chat_of(options.get("messages"))}
    return GenerationRequest(
        text=prompt if isinstance(prompt, str) else None,
        token_ids=None if prompt is None or isinstance(prompt, str) else tuple(prompt),
        sampling=sampling or SamplingParams(),
        unset_sampling=frozenset() if sampling else frozenset(SAMPLING_FIELDS),
        stop_strings=(stop,) if isinstance(stop, str) else tuple(stop),
        deadline=deadline,
        **given,
    )
