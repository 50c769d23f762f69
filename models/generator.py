"""From a request to chunks and a completion: tokenize, check, speculate, stop. The same for every architecture."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from models.tokenizers import Tokenizer
from speculation.loop import Rounds, speculate
from speculation.stopping import Stopping, StopRules
from speculation.types import (
    Chunk,
    Completion,
    GenerationRequest,
    InvalidField,
    ModelInfo,
    SpeculationStats,
    TooLong,
)

MakeRounds = Callable[[GenerationRequest, SpeculationStats], Rounds]


@dataclass(frozen=True, slots=True)
class Generator:
    """Answers requests with rounds made by `make_rounds`, within the limits that `info` states."""

    info: ModelInfo
    tokenizer: Tokenizer
    make_rounds: MakeRounds
    speculates: bool = True

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Chunk | Completion, None]:
        """Chunks as rounds commit them, then the completion. Raises InvalidField or TooLong before any work."""
        prompt = self.prompt_tokens(request)
        stats = SpeculationStats()
        stopping = Stopping(self._rules(request, len(prompt)), self.tokenizer.stream())
        k = self._speculation_length(request)
        rounds = self.make_rounds(request, stats)
        async with contextlib.aclosing(speculate(prompt, request.sampling, k, rounds, stopping, stats)) as chunks:
            async for chunk in chunks:
                yield chunk
        assert stopping.reason is not None
        yield Completion(stopping.reason, len(prompt), stopping.emitted, stats)

    def prompt_tokens(self, request: GenerationRequest) -> list[int]:
        """The prompt's token ids, checked against the vocabulary."""
        if request.token_ids is not None:
            prompt = list(request.token_ids)
        else:
            try:
                prompt = self.tokenizer.encode(request.text or "", request.chat)
            except ValueError as error:
                raise InvalidField("chat", str(error).removeprefix("chat: ")) from None
        if not prompt:
            raise InvalidField("prompt", "empty: at least one token is needed")
        check_tokens("prompt", prompt, self.info.vocab_size)
        return prompt

    def _rules(self, request: GenerationRequest, prompt_length: int) -> StopRules:
        limit = self.info.max_sequence_length
        total = limit if request.max_total_tokens is None else request.max_total_tokens
        if total > limit:
            raise TooLong(f"max_total_tokens: {total} is above the sequence length {limit}")
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

    def _speculation_length(self, request: GenerationRequest) -> int:
        if not self.speculates:
            return 0
        k = self.info.default_speculation_length if request.speculation_length is None else request.speculation_length
        if k > self.info.max_speculation_length:
            raise InvalidField("speculation_length", f"{k} is above the maximum {self.info.max_speculation_length}")
        return k


def check_tokens(field: str, tokens: list[int] | tuple[int, ...], vocab_size: int) -> None:
    """Every id is in the vocabulary; else InvalidField names the first that is not."""
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise InvalidField(field, f"token id {token} is outside the vocabulary of {vocab_size}")
