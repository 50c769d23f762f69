"""Measures architectures under load, one after another."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING

from tandem.comparison.measuring.conditions import Condition, Load
from tandem.comparison.measuring.config import ComparisonConfig
from tandem.comparison.measuring.distributions import distribution
from tandem.comparison.measuring.records import Record
from tandem.comparison.measuring.run import Contender, attempt, rotated, short
from tandem.comparison.measuring.workloads import Prompt
from tandem.speculation.types import GenerationRequest

if TYPE_CHECKING:
    from tandem.clients.encoding import Tokenizer

WARM_UP_REQUESTS = 4
BETWEEN = "\n\n"


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request of a load, the same for every architecture."""

    prompt: str
    workload: str
    run: int
    request: GenerationRequest


async def measure_loads(
    contenders: Sequence[Contender],
    requests: Sequence[LoadRequest],
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
            await _warm_up(contender, requests[: load.concurrency or WARM_UP_REQUESTS])
            tpots = list[float | None]()

            def measured(record: Record, tpots: list[float | None] = tpots) -> None:
                tpots.append(record.measurement.tpot_s if record.measurement else None)
                on_record(record)

            await _run(contender, requests[: load.requests], condition, seed, measured)
            if bound_s is not None and (distribution(tpots).p95 or 0.0) > bound_s:
                full.add(contender.name)


async def _warm_up(contender: Contender, requests: Sequence[LoadRequest]) -> None:
    """Sends short requests at once, so that no measurement includes a batch's first use."""
    cut = (replace(one, request=short(one.request)) for one in requests)
    await asyncio.gather(*(_attempt(contender.of(user), one, "warm-up") for user, one in enumerate(cut)))


async def _run(
    contender: Contender,
    requests: Sequence[LoadRequest],
    condition: Condition,
    seed: int,
    on_record: Callable[[Record], None],
) -> None:
    assert condition.load is not None, "a condition under load"
    load, began = condition.load, time.perf_counter()

    async def send(one: LoadRequest, at: float = 0.0, user: int = 0) -> None:
        await asyncio.sleep(max(0.0, at - (time.perf_counter() - began)))
        sent = time.perf_counter() - began
        done = await _attempt(contender.of(user), one, condition.name)
        on_record(replace(done, sent_s=sent, ended_s=time.perf_counter() - began))

    async def closed_loop(user: int) -> None:
        for one in waiting:  # shared: who is answered first takes the next
            await send(one, user=user)

    if load.rate is not None:
        times = arrivals(load.rate, len(requests), seed)
        await asyncio.gather(*(send(one, at) for at, one in zip(times, requests, strict=True)))
    else:
        waiting = iter(requests)
        await asyncio.gather(*map(closed_loop, range(load.concurrency or 1)))


async def _attempt(contender: Contender, one: LoadRequest, condition: str) -> Record:
    record = Record(contender.name, one.prompt, one.workload, one.run, condition=condition)
    return await attempt(contender.apart(), record, one.request, alone=False)


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


def load_requests(config: ComparisonConfig, count: int, tokenizer: Tokenizer | None = None) -> tuple[LoadRequest, ...]:
    """Returns `count` requests, whole prompts or of lengths drawn like LLMPerf's."""
    random, template = Random(f"lengths {config.sampling.seed}"), config.conditions[0].request
    prompts = ((run, prompt) for run in itertools.count() for prompt in config.prompts)
    whole = (LoadRequest(p.name, p.kind, run, p.into(template, run)) for run, p in itertools.islice(prompts, count))
    if config.mean_input_tokens is None and config.mean_output_tokens is None:
        return tuple(whole)
    return tuple(
        LoadRequest(f"load/{number}", each.workload, 0, _shaped(each.request, number, config, random, tokenizer))
        for number, each in enumerate(whole)
    )


def _shaped(
    request: GenerationRequest, number: int, config: ComparisonConfig, random: Random, tokenizer: Tokenizer | None
) -> GenerationRequest:
    """Cuts prompt and output to drawn lengths; a drawn output ignores ends of sequence."""
    inputs, outputs, room = config.mean_input_tokens, config.mean_output_tokens, config.sequence_length
    if inputs is not None:
        assert tokenizer is not None, "prompts are cut with a tokenizer"
        length = drawn_length(random, inputs, config.stddev_input_tokens, room - (outputs or config.max_new_tokens))
        room -= length
        request = replace(request, text=None, token_ids=cut(config.prompts, number, length, tokenizer), chat=False)
    if outputs is not None:
        drawn = drawn_length(random, outputs, config.stddev_output_tokens, config.sequence_length)
        request = replace(request, max_new_tokens=min(drawn, room), ignore_end_of_sequence=True)
    return request


def cut(prompts: Sequence[Prompt], number: int, length: int, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Returns exactly `length` token ids of the prompts from `number` on."""
    first = number % len(prompts)
    text = BETWEEN.join(prompt.text for prompt in (*prompts[first:], *prompts[:first]))
    while len(ids := tokenizer.encode(text, False)) < length:
        text += BETWEEN + text
    return tuple(ids[:length])
