"""Scores prompts: generates them as outputs whose tokens are known, to learn their log-probabilities."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from tandem.services.generation import Generations
from tandem.speculation.types import (
    Chunk,
    FinishReason,
    GenerationEnd,
    GenerationRequest,
    SamplingParams,
    SpeculationStats,
    Structure,
    StructureKind,
    TokenLogprobs,
)

Scores = tuple[TokenLogprobs, ...]
Run = Callable[[Sequence[GenerationRequest]], AbstractContextManager[Generations]]


async def scored(requests: Sequence[GenerationRequest], longest_draft: int, run: Run) -> list[Scores]:
    """Returns the log-probabilities of the prompt of each request, from its second token on."""
    found: list[list[TokenLogprobs]] = [[] for _ in requests]
    known = [(i, _known(each, longest_draft)) for i, each in enumerate(requests) if len(each.token_ids or ()) > 1]
    with run([request for _, request in known]) as work:
        events: AsyncIterator[tuple[int, object]]
        async with contextlib.aclosing(work.events()) as events:
            async for index, event in events:
                if isinstance(event, Chunk):
                    found[known[index][0]] += event.logprobs
    return [tuple(each) for each in found]


async def nothing(requests: Sequence[GenerationRequest]) -> AsyncGenerator[tuple[int, Chunk | GenerationEnd], None]:
    """Yields the events of generations without a token."""
    for index, request in enumerate(requests):
        yield index, Chunk()
        yield index, GenerationEnd(FinishReason.LENGTH, len(request.token_ids or ()), 0, SpeculationStats())


def _known(request: GenerationRequest, longest_draft: int) -> GenerationRequest:
    """Returns a request whose output is the prompt of `request` after its first token."""
    first, *rest = request.token_ids or ()
    return replace(
        request,
        token_ids=(first,),
        sampling=SamplingParams(structure=Structure(StructureKind.TOKENS, json.dumps(rest))),
        max_new_tokens=len(rest),
        stop_token_ids=(),
        stop_strings=(),
        ignore_end_of_sequence=True,
        prediction="",
        speculation_length=None if request.speculation_length == 0 else longest_draft,
    )
