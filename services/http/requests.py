"""Converts HTTP fields to GenerationRequests, one per choice."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from tandem.checkpoints.tokenizers import ChatTokenizer, Tokenizer
from tandem.engine.generator import LONG_TEXT, Generator
from tandem.services.http.constraints import ToolUse
from tandem.services.http.fields import MAX_CHOICES
from tandem.services.http.refusals import HttpError
from tandem.services.http.tool_calls import FORMATS
from tandem.services.security.limits import ServerLimits, check_stops
from tandem.speculation.request import members
from tandem.speculation.types import GenerationRequest, InvalidField, SamplingParams, Structure

_SEEDS = 2**64
MANY_MESSAGES = 64
STRUCTURES = ("response_format", "structured_outputs")
_SAMPLING = [each.name for each in fields(SamplingParams) if each.name != "structure"]
PROMPTS = {"chat": "messages", "completions": "prompt"}


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """`requests`: `n` per prompt. `given`: all fields."""

    chat: bool
    model: str
    requests: tuple[GenerationRequest, ...]
    prompts: tuple[tuple[int, ...], ...]
    given: Mapping[str, Any]
    tools: ToolUse

    @property
    def n(self) -> int:
        return len(self.requests) // len(self.prompts)

    @property
    def streams(self) -> bool:
        return self.says("stream")

    def says(self, name: str) -> bool:
        return bool(self.given.get(name) or self.given.get("stream_options", {}).get(name))


class RequestReader:
    def __init__(self, generator: Generator, limits: ServerLimits, adapters: Callable[[], Mapping[str, str]]) -> None:
        self._generator, self._limits, self.adapters = generator, limits, adapters
        if not isinstance(generator.tokenizer, ChatTokenizer):
            raise ValueError("http_port: this server's tokenizer renders no chats")
        self.tokenizer = generator.tokenizer
        self._format = FORMATS[self.tokenizer.tool_format() or "hermes"]
        marks = filter(None, (self._format.begin, self._format.end, *self._format.marks))
        spelt = {text: self.tokenizer.tokens(text, False) for text in marks}
        self._marks = {ids[0]: text for text, ids in spelt.items() if is_special(self.tokenizer, ids)}

    @property
    def model(self) -> str:
        return self._generator.info.model_name

    def adapter(self, model: str) -> str:
        """Returns a model name's adapter; "" is the target. Raises HttpError."""
        if model in ("", self.model):
            return ""
        if model not in self.adapters():
            names = ", ".join((self.model, *self.adapters()))
            message = f"model: there is no {model[:128]!r} here; this server has {names}"
            raise HttpError("MODEL_NOT_FOUND", message, "model")
        return model

    async def completion(self, given: Mapping[str, Any]) -> ParsedRequest:
        if "prompt" not in given:
            raise InvalidField("prompt", "missing")
        special = given.get("add_special_tokens", True)
        prompts = [await self.tokens(p, special) if isinstance(p, str) else p for p in given["prompt"]]
        return self._parsed(False, given, prompts, ToolUse())

    async def chat(self, given: Mapping[str, Any]) -> ParsedRequest:
        offered = tuple(given.get("tools", ()))
        mode, names = given.get("tool_choice", ("auto" if offered else "none", ()))
        several, shown = given.get("parallel_tool_calls", True), offered if mode != "none" else ()
        tools = ToolUse(shown, mode, names, several, self._format, self._marks)
        prompt = await self.chat_tokens(given, tools)
        return self._parsed(True, given, [prompt], tools)

    async def chat_tokens(self, given: Mapping[str, Any], tools: ToolUse) -> tuple[int, ...]:
        if "messages" not in given:
            raise InvalidField("messages", "missing")
        options = {**given.get("chat_template_kwargs", {}), "tools": list(tools.tools) or None}
        text = await self._rendered([self._format.shown(each) for each in given["messages"]], options)
        return await self.tokens(text, given.get("add_special_tokens", False))

    async def _rendered(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        def render() -> str:
            return self.tokenizer.render(messages, add_generation_prompt=True, **options)

        small = len(messages) <= MANY_MESSAGES and sum(len(each["content"]) for each in messages) <= LONG_TEXT
        try:
            return render() if small else await self._generator.encoding.run(render)
        except ValueError as error:
            raise InvalidField("messages", str(error)) from None

    async def tokens(self, text: str, special: bool) -> tuple[int, ...]:
        generator = self._generator
        self._limits.check_prompt(0, text, generator.info.max_sequence_length)
        if len(text) <= LONG_TEXT:
            return tuple(self.tokenizer.tokens(text, special))
        return tuple(await generator.encoding.run(self.tokenizer.tokens, text, special))

    def _parsed(
        self, chat: bool, given: Mapping[str, Any], prompts: Sequence[tuple[int, ...]], tools: ToolUse
    ) -> ParsedRequest:
        model = given.get("model", "")
        adapter = self.adapter(model)
        n = given.get("n", 1)
        if n * len(prompts) > MAX_CHOICES:
            raise InvalidField("n", f"{n} choices of {len(prompts)} prompts are above the limit of {MAX_CHOICES}")
        longest, prediction = self._generator.info.max_sequence_length, given.get("prediction", "")
        for prompt in prompts:
            self._limits.check_prompt(len(prompt), "", longest)
        self._limits.check_prompt(0, prediction, longest, "prediction")
        sampling = self._sampling(given, _structure(given, tools))
        stop = (*given.get("stop", ()), *tools.stop)
        spelt = [self.tokenizer.tokens(each, False) for each in stop]
        stop_ids = (*given.get("stop_token_ids", ()), *(ids[0] for ids in spelt if is_special(self.tokenizer, ids)))
        check_stops(stop_ids, "stop", stop)
        first = GenerationRequest(
            token_ids=(),
            sampling=sampling,
            max_new_tokens=given.get("max_completion_tokens", given.get("max_tokens")),
            stop_token_ids=stop_ids,
            stop_strings=stop,
            ignore_end_of_sequence=given.get("ignore_eos", False),
            logprobs=given.get("logprobs"),
            adapter=adapter,
            speculation_length=given.get("speculation_length"),
            receipt=given.get("receipt", False),
            prediction=prediction,
            **members({name: given[name] for name in ("drafts",) if name in given}),
        )
        requests = tuple(
            replace(first, token_ids=prompt, sampling=replace(sampling, seed=(sampling.seed + i) % _SEEDS))
            for prompt in prompts
            for i in range(n)
        )
        return ParsedRequest(chat, model or self.model, requests, tuple(prompts), given, tools)

    def _sampling(self, given: Mapping[str, Any], structure: Structure | None) -> SamplingParams:
        # Absent fields: operator's or model's default, else OpenAI's temperature 1 and a fresh seed, counted up per
        # choice.
        usual = {"temperature": 1.0, "seed": random.getrandbits(32)}
        defaults, neutral = self._generator.defaults, SamplingParams()
        found = {
            name: given[name] if name in given else defaults.given(name, usual.get(name, getattr(neutral, name)))
            for name in _SAMPLING
        }
        return SamplingParams(**{**found, "seed": found["seed"] % _SEEDS}, structure=structure)


def is_special(tokenizer: Tokenizer, tokens: Sequence[int]) -> bool:
    return len(tokens) == 1 and not (stream := tokenizer.stream()).push(tokens[0]) + stream.flush()


def _structure(given: Mapping[str, Any], tools: ToolUse) -> Structure | None:
    found = [name for name in STRUCTURES if given.get(name) is not None]
    if found and tools.tools:
        raise InvalidField(found[0], "an output has one structure, and tools have their own: choose none of them")
    if len(found) > 1:
        raise InvalidField(found[1], f"an output has one structure, and {found[0]} is given too")
    return given[found[0]] if found else tools.structure


def own_names(of: str, given: Mapping[str, Any]) -> dict[str, str]:
    """Returns HTTP's names of a request's fields."""
    structured = next((name for name in STRUCTURES if given.get(name) is not None), "tools")
    names = {"structure": structured, "max_new_tokens": "max_tokens", "stop_strings": "stop", "adapter": "model"}
    return {**names, "prompt": PROMPTS[of]}
