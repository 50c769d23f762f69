"""From a request to chunks and a completion: tokenize, check, speculate, stop. The same for every architecture."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field, replace

from tandem.checkpoints.tokenizers import Tokenizer
from tandem.speculation.length import AdaptiveLength, FixedLength, LengthPolicy
from tandem.speculation.loop import Rounds, speculate
from tandem.speculation.round_statistics import RoundStatistics
from tandem.speculation.stopping import Stopping, StopRules
from tandem.speculation.types import (
    Chunk,
    DraftLimit,
    GenerationEnd,
    GenerationRequest,
    InvalidField,
    ModelInfo,
    Rule,
    SamplingParams,
    SpeculationStats,
    TooLong,
)

LONG_TEXT = 1024
"""Characters of text that are tokenized at once, within about a millisecond; longer ones go to a thread."""

MakeRounds = Callable[[GenerationRequest, SpeculationStats, DraftLimit], Rounds]


@dataclass(frozen=True, slots=True)
class RequestDefaults:
    """What holds for requests that do not say. `max_new_tokens` None: until the sequence length is full."""

    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_new_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise InvalidField("max_new_tokens", f"{self.max_new_tokens} is below 1")

    def complete(self, request: GenerationRequest, room: int) -> GenerationRequest:
        """The request as if it had said everything. `room`: tokens that its sequence has left."""
        left = {name: getattr(self.sampling, name) for name in request.unsaid}
        most = request.max_new_tokens
        if most is None and self.max_new_tokens is not None:
            most = max(1, min(self.max_new_tokens, room))  # only who asks for more than there is room for is refused
        return replace(request, sampling=replace(request.sampling, **left), unsaid=frozenset(), max_new_tokens=most)


@dataclass(frozen=True, slots=True)
class Generator:
    """Answers requests with rounds made by `make_rounds`, within the limits that `info` states.

    `experience`: what its requests learn together about the best speculation length. `encoding`: who has it may
    tokenize a long text.
    """

    info: ModelInfo
    tokenizer: Tokenizer
    make_rounds: MakeRounds
    speculates: bool = True
    experience: RoundStatistics = field(default_factory=RoundStatistics)
    defaults: RequestDefaults = field(default_factory=RequestDefaults)
    encoding: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def generate(
        self, request: GenerationRequest, stats: SpeculationStats | None = None
    ) -> AsyncGenerator[Chunk | GenerationEnd, None]:
        """Chunks as rounds commit them, then the completion. Raises InvalidField or TooLong before any work.

        `stats`, where given, are those that grow as it goes, for whoever looks on.
        """
        prompt = await self.prompt_tokens(request)
        request = self.defaults.complete(request, self._total(request) - len(prompt))
        stats = SpeculationStats() if stats is None else stats
        stopping = Stopping(self._rules(request, len(prompt)), self.tokenizer.stream())
        limit = DraftLimit()
        lengths = self._lengths(request, limit)
        rounds = self.make_rounds(request, stats, limit)
        async with contextlib.aclosing(speculate(prompt, request.sampling, lengths, rounds, stopping, stats)) as chunks:
            async for chunk in chunks:
                yield chunk
        assert stopping.reason is not None
        yield GenerationEnd(stopping.reason, len(prompt), stopping.emitted, stats)

    async def prompt_tokens(self, request: GenerationRequest) -> list[int]:
        """The prompt's token ids, checked against the vocabulary."""
        if request.token_ids is not None:
            prompt = list(request.token_ids)
        else:
            try:
                prompt = await self._encoded(request.text or "", request.chat)
            except ValueError as error:
                raise InvalidField("chat", str(error).removeprefix("chat: ")) from None
        if not prompt:
            raise InvalidField("prompt", "empty: at least one token is needed")
        check_tokens("prompt", prompt, self.info.vocab_size)
        return prompt

    async def _encoded(self, text: str, chat: bool) -> list[int]:
        """Long texts in a thread, one at a time: a megabyte takes seconds, in which others would not be answered."""
        if len(text) <= LONG_TEXT:
            return self.tokenizer.encode(text, chat)
        async with self.encoding:
            return await asyncio.to_thread(self.tokenizer.encode, text, chat)

    def _total(self, request: GenerationRequest) -> int:
        limit = self.info.max_sequence_length
        total = limit if request.max_total_tokens is None else request.max_total_tokens
        if total > limit:
            raise TooLong(f"max_total_tokens: {total} is above the sequence length {limit}")
        return total

    def _rules(self, request: GenerationRequest, prompt_length: int) -> StopRules:
        total = self._total(request)
        room = total - prompt_length
        if room < 1:
            raise TooLong(
                f"the prompt has {prompt_length} tokens and the sequence length is {total}: no room to generate"
            )
        if request.max_new_tokens is not None and request.max_new_tokens > room:
            raise TooLong(
                f"the prompt has {prompt_length} tokens and max_new_tokens is {request.max_new_tokens}: "
                f"together above the sequence length {total}"
            )
        check_tokens("stop_token_ids", request.stop_token_ids, self.info.vocab_size)
        ends = () if request.ignore_end_of_sequence else self.info.end_of_sequence_ids
        return StopRules(
            max_new_tokens=request.max_new_tokens or room,
            end_of_sequence_ids=frozenset(ends),
            stop_token_ids=frozenset(request.stop_token_ids),
            stop_strings=request.stop_strings,
        )

    def _lengths(self, request: GenerationRequest, limit: DraftLimit) -> LengthPolicy:
        if not self.speculates:
            return FixedLength(0)
        most = self.info.max_speculation_length
        if request.speculation_length is None and self.info.adaptive_speculation_length and _any_length(request):
            return AdaptiveLength(most, self.experience, limit)
        k = self.info.default_speculation_length if request.speculation_length is None else request.speculation_length
        if k > most:
            raise InvalidField("speculation_length", f"{k} is above the maximum {most}")
        return FixedLength(k)


def _any_length(request: GenerationRequest) -> bool:
    """Whether tokens are the same for any lengths. Sampled under rejection they are not: a retry must say the same."""
    return request.rule is Rule.AGREEMENT or request.sampling.greedy


def check_tokens(field: str, tokens: list[int] | tuple[int, ...], vocab_size: int) -> None:
    """Every id is in the vocabulary; else InvalidField names the first that is not."""
    if not tokens or (min(tokens) >= 0 and max(tokens) < vocab_size):
        return
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise InvalidField(field, f"token id {token} is outside the vocabulary of {vocab_size}")
