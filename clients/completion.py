"""The public API's requests and completions."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tandem.speculation.types import (
    SAMPLING_FIELDS,
    Chunk,
    FinishReason,
    GenerationEnd,
    GenerationRequest,
    Rule,
    SamplingParams,
    SpeculationStats,
    TokenLogprobs,
)

Prompt: TypeAlias = str | Sequence[int]
"""Text, or token ids."""

Events: TypeAlias = AsyncGenerator[Chunk | GenerationEnd, None]


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished continuation. `statistics` counts the request's rounds and measures where its time went.

    `logprobs`: one per token, if asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    output_tokens: int
    statistics: SpeculationStats
    logprobs: tuple[TokenLogprobs, ...] = ()


async def completion_of(events: Events) -> Completion:
    """Waits for the end of a generation. Raises what `events` raises."""
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
    )


async def chunks_of(events: Events) -> AsyncGenerator[Chunk, None]:
    """Yields a generation's chunks without its end."""
    async with contextlib.aclosing(events):
        async for event in events:
            if isinstance(event, Chunk):
                yield event


def request_of(
    prompt: Prompt,
    sampling: SamplingParams | None,
    max_new_tokens: int | None,
    stop: str | Sequence[str],
    *,
    chat: bool = False,
    ignore_end_of_sequence: bool = False,
    speculation_length: int | None = None,
    rule: str = "agreement",
    logprobs: int | None = None,
    adapter: str = "",
) -> GenerationRequest:
    """Builds a request. `sampling` None leaves every field to the server. Raises InvalidField, a ValueError."""
    text, tokens = (prompt, None) if isinstance(prompt, str) else (None, tuple(prompt))
    return GenerationRequest(
        text=text,
        token_ids=tokens,
        chat=chat,
        sampling=sampling or SamplingParams(),
        unset_sampling=frozenset() if sampling else frozenset(SAMPLING_FIELDS),
        max_new_tokens=max_new_tokens,
        speculation_length=speculation_length,
        stop_strings=(stop,) if isinstance(stop, str) else tuple(stop),
        ignore_end_of_sequence=ignore_end_of_sequence,
        rule=Rule.named(rule),
        logprobs=logprobs,
        adapter=adapter,
    )
