"""Answers a generation request: tokenizes, checks, speculates and stops; common to all architectures."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from tandem.checkpoints.tokenizers import ChatTokenizer, Tokenizer
from tandem.engine.fair_turns import FairThread
from tandem.speculation.chat import ChatMessage
from tandem.speculation.estimate import Estimate
from tandem.speculation.length import AdaptiveLength, FixedLength
from tandem.speculation.loop import Rounds, speculate
from tandem.speculation.stopping import Stopping
from tandem.speculation.types import (
    Chunk,
    GenerationEnd,
    GenerationRequest,
    InvalidField,
    ModelInfo,
    Rule,
    SamplingParams,
    SpeculationStats,
    TooLong,
)

LONG_TEXT = 1024  # characters; shorter texts are tokenized directly, within a millisecond, longer ones in a thread

LONG_TEXTS = 1024  # limit of a caller's texts that wait

MakeRounds = Callable[[GenerationRequest, SpeculationStats], Rounds]


@dataclass(frozen=True, slots=True)
class RequestDefaults:
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_new_tokens: int | None = None  # None: up to the sequence length
    sources: Mapping[str, str] = field(default_factory=dict)  # by field: a flag, or a file of the model

    def __post_init__(self) -> None:
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise InvalidField("max_new_tokens", f"{self.max_new_tokens} is below 1")

    def complete(self, request: GenerationRequest, room: int) -> GenerationRequest:
        """Sets all fields. `room`: tokens that fit after the prompt."""
        defaults = {name: getattr(self.sampling, name) for name in request.unset_sampling}
        most = request.max_new_tokens
        if most is None and self.max_new_tokens is not None:
            most = max(1, min(self.max_new_tokens, room))  # only an explicit request for too many tokens is refused
        return replace(
            request, sampling=replace(request.sampling, **defaults), unset_sampling=frozenset(), max_new_tokens=most
        )

    def given(self, name: str, otherwise: Any) -> Any:
        """A sampling field's default, or `otherwise`."""
        return getattr(self.sampling, name) if name in self.sources else otherwise

    def over(self, values: Mapping[str, Any], source: str) -> RequestDefaults:
        """Adds defaults of a `source` for unset fields. Raises InvalidField."""
        fresh = {name: value for name, value in values.items() if name not in self.sources}
        sampling = {name: value for name, value in fresh.items() if name != "max_new_tokens"}
        return RequestDefaults(
            replace(self.sampling, **sampling),
            fresh.get("max_new_tokens", self.max_new_tokens),
            {**self.sources, **dict.fromkeys(fresh, source)},
        )

    def __str__(self) -> str:
        said = ((name, getattr(self.sampling, name, self.max_new_tokens), who) for name, who in self.sources.items())
        return (
            ", ".join(f"{name} {value:g} ({who})" for name, value, who in said)
            or "Tandem's own: greedy, for OpenAI clients temperature 1"
        )


@dataclass(frozen=True, slots=True)
class Generator:
    """Answers requests with rounds from `make_rounds`, within the limits of `info`."""

    info: ModelInfo
    tokenizer: Tokenizer
    make_rounds: MakeRounds
    speculates: bool = True
    estimate: Estimate = field(default_factory=Estimate)
    defaults: RequestDefaults = field(default_factory=RequestDefaults)
    encoding: FairThread = field(
        default_factory=partial(FairThread, "tokenizer", "their prompt to be tokenized", LONG_TEXTS)
    )
    fallback: Generator | None = None  # for requests that `answers` rejects
    answers: Callable[[GenerationRequest], bool] = lambda request: True
    placement: str = ""

    async def generate(
        self, request: GenerationRequest, stats: SpeculationStats | None = None
    ) -> AsyncGenerator[Chunk | GenerationEnd, None]:
        """Yields chunks, then the end. Raises InvalidField or TooLong before any work."""
        prompt = await self.prompt_tokens(request)
        request = self.defaults.complete(request, self._total(request) - len(prompt))
        if request.prediction:
            request = replace(request, predicted=await self.predicted_tokens(request.prediction))
        stats = SpeculationStats() if stats is None else stats
        stopping = self._stopping(request, len(prompt))
        chosen = self.fallback if self.fallback and not self.answers(request) else self
        stats.placement = chosen.placement
        lengths = chosen._lengths(request)
        rounds = chosen.make_rounds(request, stats)
        lengths = rounds.lengths or lengths
        async with contextlib.aclosing(speculate(prompt, lengths, rounds, stopping, stats)) as chunks:
            async for chunk in chunks:
                yield chunk
        assert stopping.reason is not None
        yield GenerationEnd(stopping.reason, len(prompt), stopping.emitted, stats)

    async def prompt_tokens(self, request: GenerationRequest) -> list[int]:
        """The prompt's checked token ids. Raises InvalidField."""
        if request.token_ids is not None:
            prompt = list(request.token_ids)
        elif (chat := request.messages) is not None:
            length = sum(16 + each.length for each in chat)  # each message counts as some characters
            prompt = await self._encoded(partial(chat_tokens, self.tokenizer, chat), length)
        else:
            text = request.text or ""
            try:
                prompt = await self._encoded(partial(self.tokenizer.encode, text, request.chat), len(text))
            except ValueError as error:
                raise InvalidField("chat", str(error).removeprefix("chat: ")) from None
        if not prompt:
            raise InvalidField("prompt", "empty: at least one token is needed")
        check_tokens("prompt", prompt, self.info.vocab_size)
        return prompt

    async def predicted_tokens(self, text: str) -> tuple[int, ...]:
        encode = self.tokenizer.tokens if isinstance(self.tokenizer, ChatTokenizer) else self.tokenizer.encode
        return tuple((await self._encoded(partial(encode, text, False), len(text)))[: self.info.max_sequence_length])

    async def _encoded(self, encode: Callable[[], list[int]], length: int) -> list[int]:
        # a megabyte would block the event loop for seconds
        return encode() if length <= LONG_TEXT else await self.encoding.run(encode)

    def _total(self, request: GenerationRequest) -> int:
        limit = self.info.max_sequence_length
        total = limit if request.max_total_tokens is None else request.max_total_tokens
        if total > limit:
            raise TooLong(f"max_total_tokens: {total} is above the sequence length {limit}")
        return total

    def _stopping(self, request: GenerationRequest, prompt_length: int) -> Stopping:
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
        return Stopping(
            self.tokenizer.stream(),
            max_new_tokens=request.max_new_tokens or room,
            end_of_sequence_ids=frozenset(ends),
            stop_token_ids=frozenset(request.stop_token_ids),
            stop_strings=request.stop_strings,
        )

    def _lengths(self, request: GenerationRequest) -> FixedLength:
        if not self.speculates:
            return FixedLength(0)
        most = self.info.max_speculation_length
        adaptive = request.speculation_length is None and self.info.adaptive_speculation_length
        # under the rejection rule, samples depend on draft lengths
        if adaptive and (request.rule is Rule.AGREEMENT or request.sampling.greedy):
            return AdaptiveLength(most, self.estimate)
        k = self.info.default_speculation_length if request.speculation_length is None else request.speculation_length
        if k > most:
            raise InvalidField("speculation_length", f"{k} is above the maximum {most}")
        return FixedLength(k)


def check_tokens(field: str, tokens: list[int] | tuple[int, ...], vocab_size: int) -> None:
    """Raises InvalidField for the first token outside the vocabulary."""
    if not tokens or (min(tokens) >= 0 and max(tokens) < vocab_size):
        return
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise InvalidField(field, f"token id {token} is outside the vocabulary of {vocab_size}")


def chat_tokens(tokenizer: Tokenizer, messages: Sequence[ChatMessage]) -> list[int]:
    """Token ids of a chat, up to the assistant's next turn. Raises InvalidField."""
    if not isinstance(tokenizer, ChatTokenizer):
        raise InvalidField("messages", "this server's tokenizer renders no chats")
    shown = [each.for_template for each in messages]
    try:
        text = tokenizer.render(shown, add_generation_prompt=True, tools=None)
    except ValueError as error:
        raise InvalidField("messages", str(error)) from None
    return tokenizer.tokens(text, special=False)
