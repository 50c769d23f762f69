"""Runs contenders in turn: one answers while the others are idle."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from benchmarks.figures import Sample, end_to_end
from tandem.comparison.measuring.deployment import Endpoint
from tandem.comparison.measuring.timed_request import rotated
from tandem.comparison.measuring.workloads import Prompt
from tandem.rpc.generation_client import GenerationClient
from tandem.speculation.types import Chunk, GenerationRequest, ModelInfo

WARM_UP_TOKENS = 12


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer and its times."""

    token_ids: tuple[int, ...]
    seconds: float
    first_seconds: float  # until the first `first_tokens` had come
    first_tokens: int


class Contender(Protocol):
    """Answers a prompt greedily, ignoring ends of sequence."""

    @property
    def name(self) -> str: ...

    async def answer(self, prompt: Sequence[int], max_new_tokens: int) -> Answered: ...


class Crowd(Contender, Protocol):
    async def answer_all(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[Answered]: ...


@dataclass(frozen=True, slots=True)
class Ours:
    """A Tandem server, over gRPC."""

    name: str
    client: GenerationClient
    speculation_length: int | None

    async def answer(self, prompt: Sequence[int], max_new_tokens: int) -> Answered:
        request = GenerationRequest(
            token_ids=tuple(prompt),
            max_new_tokens=max_new_tokens,
            speculation_length=self.speculation_length,
            ignore_end_of_sequence=True,
        )
        tokens: list[int] = []
        first, first_seconds = 0, 0.0
        sent = time.perf_counter()
        async with contextlib.aclosing(self.client.generate(request)) as events:
            async for event in events:
                if isinstance(event, Chunk) and event.token_ids:
                    tokens += event.token_ids
                    if not first:
                        first, first_seconds = len(tokens), time.perf_counter() - sent
        return Answered(tuple(tokens), time.perf_counter() - sent, first_seconds, first)

    async def answer_all(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[Answered]:
        return list(await asyncio.gather(*(self.answer(prompt, max_new_tokens) for prompt in prompts)))


def ready(say: Callable[[str], None]) -> Callable[[str, str, float], None]:
    """Returns a fleet's callback that prints a ready server's name, address and start-up time."""
    return lambda name, address, seconds: say(f"{name} is ready on {address} after {seconds:.1f} s")


async def describe(address: str, service: str) -> ModelInfo:
    async with GenerationClient.connect(address, service) as client:
        return await client.model_info()


async def connect(
    stack: contextlib.AsyncExitStack, endpoints: Mapping[str, Endpoint], speculation_length: int | None
) -> list[Ours]:
    """Opens a contender per endpoint; `stack` closes them."""
    return [
        Ours(
            name,
            await stack.enter_async_context(GenerationClient.connect(e.address, e.architecture.service)),
            speculation_length,
        )
        for name, e in endpoints.items()
    ]


def encode(prompts: Sequence[Prompt], model: str | None = None) -> dict[str, list[int]]:
    """Tokenizes the prompts, so that all contenders get the same ids and none pays for it."""
    from tandem.checkpoints.locate import find
    from tandem.checkpoints.tokenizers import HuggingFaceTokenizer

    tokenizer = HuggingFaceTokenizer(find(model))
    return {prompt.name: tokenizer.encode(prompt.text, prompt.chat) for prompt in prompts}


async def answer_in_turn(
    contenders: Sequence[Contender],
    prompts: Sequence[Prompt],
    encoded: Mapping[str, Sequence[int]],
    max_new_tokens: int,
    runs: int,
    say: Callable[[str], None],
    samples: list[Sample],
) -> None:
    """Warms up, then lets each contender answer every prompt alone; the order rotates."""
    for contender in contenders:
        await contender.answer(encoded[prompts[0].name], min(WARM_UP_TOKENS, max_new_tokens))
    for turn, (run, prompt) in enumerate((run, prompt) for run in range(runs) for prompt in prompts):
        shown: list[str] = []
        for contender in rotated(contenders, turn):
            answered = await contender.answer(encoded[prompt.name], max_new_tokens)
            if len(answered.token_ids) != max_new_tokens:
                raise RuntimeError(f"{contender.name} gave {len(answered.token_ids)} tokens on {prompt.name}")
            samples.append(
                Sample(
                    contender.name,
                    prompt.name,
                    prompt.kind,
                    run,
                    answered.token_ids,
                    answered.seconds,
                    answered.first_seconds,
                    answered.first_tokens,
                )
            )
            shown.append(f"{contender.name} {end_to_end(samples[-1]):.1f}")
        say(f"[{turn + 1}/{runs * len(prompts)}] {prompt.name}, ms per token: " + "; ".join(shown))
