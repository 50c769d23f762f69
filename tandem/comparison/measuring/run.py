"""Sends the same requests to every architecture in turn and times them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

from tandem.comparison.measuring.conditions import Condition
from tandem.comparison.measuring.distributions import ratio
from tandem.comparison.measuring.identity import MarginTrace
from tandem.comparison.measuring.machine_load import LoadWatch
from tandem.comparison.measuring.records import Failure, Measurement, Record, attribute_seconds, failure_of
from tandem.comparison.measuring.workloads import Prompt
from tandem.speculation.types import Chunk, GenerationEnd, GenerationRequest, SpeculationStats

if TYPE_CHECKING:
    from tandem.comparison.measuring.openai_client import OpenAIClient
    from tandem.comparison.measuring.vllm_counters import Counters
    from tandem.rpc.generation_client import GenerationClient

WARM_UP_TOKENS = 8
# a measurement's server counts
COUNTS = {f.name for f in fields(Measurement)} & {f.name for f in fields(SpeculationStats)} - {"bytes_up", "bytes_down"}

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Contender:
    """An architecture under test."""

    name: str
    generator: GenerationClient | OpenAIClient
    split: bool = False  # draft and target run apart; traffic between them is counted
    timeout_s: float | None = None  # per request
    all_ours: bool = True  # this process started every server, so their processor time is known
    own: tuple[GenerationClient | OpenAIClient, ...] = ()  # draft workers of the second and later users
    counters: Counters | None = None  # of a server whose answers lack counts

    def of(self, user: int) -> Contender:
        """Returns the contender with the user's own draft worker, if any."""
        return replace(self, generator=self.own[user - 1]) if 0 < user <= len(self.own) else self

    def apart(self) -> Contender:
        """Returns a copy with byte counts of its own."""
        return replace(self, generator=self.generator.sharing(), counters=None)


async def _as_it_is(condition: Condition, share: float = 0.0) -> None:
    """Changes no link."""


class IncompleteStream(RuntimeError):
    """The stream of chunks was incomplete, so its timing is invalid."""

    code = "INCOMPLETE_STREAM"


def short(request: GenerationRequest) -> GenerationRequest:
    """Returns the request cut to a warm-up."""
    return replace(request, max_new_tokens=min(WARM_UP_TOKENS, request.max_new_tokens or WARM_UP_TOKENS))


async def warm_up(contenders: Sequence[Contender], prompt: Prompt, request: GenerationRequest) -> dict[str, Failure]:
    """Sends one short request to each contender; returns the failures."""
    failures: dict[str, Failure] = {}
    for contender in contenders:
        record = Record(contender.name, prompt.name, prompt.kind, 0, condition="warm-up")
        if error := (await attempt(contender, record, short(prompt.into(request)))).error:
            failures[contender.name] = error
    return failures


async def measure_all(
    contenders: Sequence[Contender],
    prompts: Sequence[Prompt],
    num_runs: int,
    conditions: Sequence[Condition],
    enter: Callable[[Condition, float], Awaitable[None]] = _as_it_is,
    on_start: Callable[[str, str], None] = lambda architecture, prompt: None,
    on_record: Callable[[Record], None] = lambda record: None,
    after_prompt: Callable[[Prompt], Awaitable[None]] | None = None,
) -> list[Record]:
    """Measures all requests; `on_record` gets each record before the next request.

    Contenders take turns and the first rotates, so that a machine's drift favors none. `enter` gets the share of turns
    that have passed. `after_prompt` runs under the first condition, after every prompt of every run.
    """
    records, turns = list[Record](), num_runs * len(prompts)
    for turn, (run, prompt) in enumerate(itertools.product(range(num_runs), prompts)):
        for condition in conditions:
            for contender in rotated(contenders, turn):
                on_start(contender.name, prompt.name)
                await enter(condition, turn / turns)
                record = Record(contender.name, prompt.name, prompt.kind, run, condition=condition.name)
                records.append(await attempt(contender, record, prompt.into(condition.request, run)))
                on_record(records[-1])
        if after_prompt:
            await enter(conditions[0], turn / turns)
            await after_prompt(prompt)
    return records


def rotated(items: Sequence[Item], turn: int) -> list[Item]:
    """Returns the items with the first rotated by `turn`."""
    first = turn % len(items)
    return [*items[first:], *items[:first]]


async def attempt(contender: Contender, record: Record, request: GenerationRequest, alone: bool = True) -> Record:
    """Measures one request and completes its record; errors are recorded. `alone`: no other request runs."""
    watch = await LoadWatch.started(alone)
    try:
        done = replace(record, measurement=await measure(contender, request))
    except Exception as error:
        done = replace(record, error=failure_of(error))
    return replace(done, machine_load=watch.ended(contender.all_ours))


async def measure(contender: Contender, request: GenerationRequest) -> Measurement:
    """Times one request from sending to completion. Raises IncompleteStream."""
    generator, chunks, arrivals = contender.generator, list[Chunk](), list[float]()  # arrivals: of those with tokens
    up, down = generator.bytes_up, generator.bytes_down
    completion: GenerationEnd | None = None
    if contender.counters:
        await contender.counters.begin()
    sent = time.perf_counter()
    async for event in generator.generate(request, timeout=contender.timeout_s):
        if isinstance(event, GenerationEnd):
            completion = event
            continue
        if event.token_ids:
            arrivals.append(time.perf_counter() - sent)
        chunks.append(event)
    end_to_end_s = time.perf_counter() - sent
    if completion is None:
        raise IncompleteStream(f"the stream ended after {len(arrivals)} chunks of tokens without a completion")
    if contender.counters:
        completion = replace(completion, stats=await contender.counters.stats(completion.output_tokens))
    own = generator.bytes_up - up, generator.bytes_down - down
    between = completion.stats.bytes_up, completion.stats.bytes_down
    return _measurement(chunks, arrivals, completion, end_to_end_s, between if contender.split else own)


def _measurement(
    chunks: Sequence[Chunk],
    arrivals: Sequence[float],
    completion: GenerationEnd,
    end_to_end_s: float,
    payload: tuple[int, int],
) -> Measurement:
    """Builds a measurement. `payload`: bytes up and down."""
    tokens, stats = tuple(token for chunk in chunks for token in chunk.token_ids), completion.stats
    if not tokens or completion.output_tokens != len(tokens):
        raise IncompleteStream(f"the completion counts {completion.output_tokens} tokens, the chunks {len(tokens)}")
    seconds, clamped = attribute_seconds(end_to_end_s, stats)
    return Measurement(
        output_token_ids=tokens,
        text="".join(chunk.text for chunk in chunks),
        finish_reason=completion.finish_reason.name.lower(),
        number_input_tokens=completion.prompt_tokens,
        output_tokens=len(tokens),
        ttft_s=arrivals[0],
        tpot_s=(end_to_end_s - arrivals[0]) / (len(tokens) - 1) if len(tokens) > 1 else None,
        inter_token_latency_s=arrivals[-1] / len(tokens),
        end_to_end_latency_s=end_to_end_s,
        request_output_throughput_token_per_s=ratio(len(tokens), end_to_end_s),
        chunk_tokens=tuple(len(chunk.token_ids) for chunk in chunks if chunk.token_ids),
        chunk_gaps_s=tuple(later - earlier for earlier, later in itertools.pairwise(arrivals)),
        bytes_up=payload[0],
        bytes_down=payload[1],
        seconds_by_cause=seconds,
        other_clamped=clamped,
        **{name: _frozen(getattr(stats, name)) for name in COUNTS},
    )


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


async def trace_margins(
    autoregressive: Contender, prompts: Iterable[Prompt], request: GenerationRequest
) -> dict[str, MarginTrace]:
    """Repeats prompts, untimed, for the logit margins: they cost server time. Ignores failed requests."""
    traces: dict[str, MarginTrace] = {}
    for prompt in prompts:
        traced = replace(prompt.into(request), margins=True)
        chunks: list[Chunk] = []
        try:
            async for event in autoregressive.generator.generate(traced, timeout=autoregressive.timeout_s):
                if isinstance(event, Chunk):
                    chunks.append(event)
        except Exception:
            continue
        traces[prompt.name] = MarginTrace(
            tuple(token for chunk in chunks for token in chunk.token_ids),
            tuple(margin for chunk in chunks for margin in chunk.margins),
        )
    return traces
