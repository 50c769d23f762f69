"""Makes the requests of a load, from whole prompts or prompts cut to drawn lengths."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING

from tandem.comparison.measuring.config import ComparisonConfig
from tandem.comparison.measuring.loads import drawn_length
from tandem.comparison.measuring.workloads import Prompt
from tandem.speculation.types import GenerationRequest

if TYPE_CHECKING:
    from tandem.clients.encoding import Tokenizer

BETWEEN = "\n\n"


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of a load, the same for every architecture."""

    prompt: str
    workload: str
    run: int
    request: GenerationRequest


def requests_of(config: ComparisonConfig, count: int, tokenizer: Tokenizer | None = None) -> tuple[Asked, ...]:
    """Returns `count` requests with lengths drawn like LLMPerf's; set output lengths ignore ends of sequence."""
    random = Random(f"lengths {config.sampling.seed}")
    made = itertools.islice(_as_they_are(config), count)
    return tuple(_shaped(asked, number, config, random, tokenizer) for number, asked in enumerate(made))


def most_requests(config: ComparisonConfig) -> int:
    """Returns the requests of the longest load; the others take its first."""
    return max(load.requests for load in config.loads)


def names_of(config: ComparisonConfig) -> tuple[str, ...]:
    """Returns the prompt names that only loads have."""
    shaped = config.mean_input_tokens or config.mean_output_tokens
    return tuple(f"load/{number}" for number in range(most_requests(config))) if shaped else ()


def _as_they_are(config: ComparisonConfig) -> Iterator[Asked]:
    request = config.conditions[0].request
    for run in itertools.count():
        for prompt in config.prompts:
            yield Asked(prompt.name, prompt.kind, run, prompt.into(request, run))


def _shaped(asked: Asked, number: int, config: ComparisonConfig, random: Random, tokenizer: Tokenizer | None) -> Asked:
    inputs, outputs, room = config.mean_input_tokens, config.mean_output_tokens, config.sequence_length
    request = asked.request
    if inputs is None and outputs is None:
        return asked
    if inputs is not None:
        assert tokenizer is not None, "prompts are cut with a tokenizer"
        length = drawn_length(random, inputs, config.stddev_input_tokens, room - (outputs or config.max_new_tokens))
        room -= length
        request = replace(request, text=None, token_ids=cut(config.prompts, number, length, tokenizer), chat=False)
    if outputs is not None:
        drawn = drawn_length(random, outputs, config.stddev_output_tokens, config.sequence_length)
        length = min(drawn, room)
        request = replace(request, max_new_tokens=length, ignore_end_of_sequence=True)
    return Asked(f"load/{number}", asked.workload, 0, request)


def cut(prompts: Sequence[Prompt], number: int, length: int, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Returns exactly `length` token ids of the prompts from `number` on."""
    first = number % len(prompts)
    text = BETWEEN.join(prompt.text for prompt in (*prompts[first:], *prompts[:first]))
    ids = tokenizer.encode(text, False)
    while len(ids) < length:
        text += BETWEEN + text
        ids = tokenizer.encode(text, False)
    return tuple(ids[:length])
