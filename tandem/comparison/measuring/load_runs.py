"""Measures architectures under load, one after another."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

from tandem.comparison.measuring.architectures import Condition, Load
from tandem.comparison.measuring.config import ComparisonConfig
from tandem.comparison.measuring.distributions import distribution
from tandem.comparison.measuring.records import Record
from tandem.comparison.measuring.timed_request import Contender, attempt, rotated, short
from tandem.comparison.measuring.workloads import Prompt

if TYPE_CHECKING:
    from tandem.clients.local import Tokenizer

WARM_UP_REQUESTS = 4
BETWEEN = "\n\n"


Turns = Sequence[tuple[int, Prompt]]  # run and prompt


async def measure_loads(
    contenders: Sequence[Contender],
    turns: Turns,
    conditions: Sequence[Condition],
    seed: int,
    on_load: Callable[[str, Load], None],
    on_record: Callable[[Record], None],
    bound_s: float | None = None,
) -> None:
    """Puts each load on each architecture while the others idle, with the same requests and arrival times.

    `bound_s`: an architecture whose 95th percentile of TPOT exceeds it gets no more users.
    """
    full = set[str]()
    for turn, condition in enumerate(conditions):
        load = condition.load
        assert load is not None, "a condition under load"
        for contender in rotated(contenders, turn):
            if contender.name in full and load.concurrency:
                continue
            on_load(contender.name, load)
            await _warm_up(contender, condition, turns[: load.concurrency or WARM_UP_REQUESTS])
            tpots = list[float | None]()

            def measured(record: Record, tpots: list[float | None] = tpots) -> None:
                tpots.append(record.measurement.tpot_s if record.measurement else None)
                on_record(record)

            await _run(contender, turns[: load.requests], condition, seed, measured)
            if bound_s is not None and (distribution(tpots).p95 or 0.0) > bound_s:
                full.add(contender.name)


async def _warm_up(contender: Contender, condition: Condition, turns: Turns) -> None:
    """Sends short requests at once, so that no measurement includes a batch's first use."""
    sent = (_attempt(contender.of(user), condition, *turn, warm_up=True) for user, turn in enumerate(turns))
    await asyncio.gather(*sent)


async def _run(
    contender: Contender, turns: Turns, condition: Condition, seed: int, on_record: Callable[[Record], None]
) -> None:
    assert condition.load is not None, "a condition under load"
    load, began = condition.load, time.perf_counter()

    async def send(run: int, prompt: Prompt, at: float = 0.0, user: int = 0) -> None:
        await asyncio.sleep(max(0.0, at - (time.perf_counter() - began)))
        sent = time.perf_counter() - began
        done = await _attempt(contender.of(user), condition, run, prompt)
        on_record(replace(done, sent_s=sent, ended_s=time.perf_counter() - began))

    async def closed_loop(user: int) -> None:
        for run, prompt in waiting:  # shared: who is answered first takes the next
            await send(run, prompt, user=user)

    if load.rate is not None:
        times = arrivals(load.rate, len(turns), seed)
        await asyncio.gather(*(send(*turn, at) for at, turn in zip(times, turns, strict=True)))
    else:
        waiting = iter(turns)
        await asyncio.gather(*map(closed_loop, range(load.concurrency or 1)))


async def _attempt(
    contender: Contender, condition: Condition, run: int, prompt: Prompt, warm_up: bool = False
) -> Record:
    request = prompt.into(condition.request, run)
    record = Record(contender.name, prompt.name, prompt.kind, run, condition=condition.name)
    return await attempt(contender.apart(), record, short(request) if warm_up else request, alone=False)


def arrivals(rate: float, count: int, seed: int) -> tuple[float, ...]:
    """Returns Poisson arrival times in seconds, equal for equal seeds."""
    random, at = Random(f"arrivals {seed}"), 0.0
    return tuple(at := at + random.expovariate(rate) for _ in range(count))


def drawn_length(random: Random, mean: int, stddev: int, most: int) -> int:
    """Draws a whole normal number from 1 to `most`, repeating draws outside, as LLMPerf does."""
    while True:
        drawn = int(random.gauss(mean, stddev))
        if 1 <= drawn <= most:
            return drawn


def load_turns(config: ComparisonConfig, count: int, tokenizer: Tokenizer | None = None) -> Turns:
    """Returns `count` runs of prompts, whole or of lengths drawn like LLMPerf's."""
    random = Random(f"lengths {config.sampling.seed}")
    turns = [(run, prompt) for run in range(-(-count // len(config.prompts))) for prompt in config.prompts][:count]
    if config.mean_input_tokens is None and config.mean_output_tokens is None:
        return turns
    return [(run, _shaped(prompt, number, config, random, tokenizer)) for number, (run, prompt) in enumerate(turns)]


def _shaped(
    prompt: Prompt, number: int, config: ComparisonConfig, random: Random, tokenizer: Tokenizer | None
) -> Prompt:
    """Cuts prompt and output to drawn lengths."""
    inputs, outputs, room = config.mean_input_tokens, config.mean_output_tokens, config.sequence_length
    prompt = replace(prompt, name=f"load/{number}")
    if inputs is not None:
        assert tokenizer is not None, "prompts are cut with a tokenizer"
        length = drawn_length(random, inputs, config.stddev_input_tokens, room - (outputs or config.max_new_tokens))
        room -= length
        prompt = replace(prompt, token_ids=cut(config.prompts, number, length, tokenizer), chat=False)
    if outputs is not None:
        drawn = drawn_length(random, outputs, config.stddev_output_tokens, config.sequence_length)
        prompt = replace(prompt, new_tokens=min(drawn, room))
    return prompt


def cut(prompts: Sequence[Prompt], number: int, length: int, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Returns exactly `length` token ids of the prompts from `number` on."""
    first = number % len(prompts)
    text = BETWEEN.join(prompt.text for prompt in (*prompts[first:], *prompts[:first]))
    while len(ids := tokenizer.encode(text, False)) < length:
        text += BETWEEN + text
    return tuple(ids[:length])
