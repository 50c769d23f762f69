"""Times one request."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

from tandem.comparison.measuring.distributions import ratio
from tandem.comparison.measuring.machine import LoadWatch
from tandem.comparison.measuring.records import Measurement, Record, attribute_seconds, failure_of
from tandem.speculation.types import Chunk, GenerationEnd, GenerationRequest, SpeculationStats

if TYPE_CHECKING:
    from tandem.clients.openai_client import OpenAIClient
    from tandem.comparison.measuring.vllm import Counters
    from tandem.rpc.generation_client import GenerationClient

WARM_UP_TOKENS = 8
# a measurement's server counts
COUNTS = {f.name for f in fields(Measurement)} & {f.name for f in fields(SpeculationStats)} - {"bytes_up", "bytes_down"}

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Contender:
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
        return replace(self, generator=self.generator.sharing(), counters=None)


class IncompleteStream(RuntimeError):
    """The stream of chunks was incomplete, so its timing is invalid."""

    code = "INCOMPLETE_STREAM"


def short(request: GenerationRequest) -> GenerationRequest:
    return replace(request, max_new_tokens=min(WARM_UP_TOKENS, request.max_new_tokens or WARM_UP_TOKENS))


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
    whole = time.perf_counter() - sent
    if completion is None:
        raise IncompleteStream(f"the stream ended after {len(arrivals)} chunks of tokens without a completion")
    tokens = tuple(token for chunk in chunks for token in chunk.token_ids)
    if not tokens or completion.output_tokens != len(tokens):
        raise IncompleteStream(f"the completion counts {completion.output_tokens} tokens, the chunks {len(tokens)}")
    stats = await contender.counters.stats(len(tokens)) if contender.counters else completion.stats
    seconds, clamped = attribute_seconds(whole, stats)
    counts = ((name, getattr(stats, name)) for name in COUNTS)
    frozen: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in counts}
    return Measurement(
        output_token_ids=tokens,
        text="".join(chunk.text for chunk in chunks),
        finish_reason=completion.finish_reason.name.lower(),
        number_input_tokens=completion.prompt_tokens,
        output_tokens=len(tokens),
        ttft_s=arrivals[0],
        tpot_s=(whole - arrivals[0]) / (len(tokens) - 1) if len(tokens) > 1 else None,
        inter_token_latency_s=arrivals[-1] / len(tokens),
        end_to_end_latency_s=whole,
        request_output_throughput_token_per_s=ratio(len(tokens), whole),
        chunk_tokens=tuple(len(chunk.token_ids) for chunk in chunks if chunk.token_ids),
        chunk_gaps_s=tuple(later - earlier for earlier, later in itertools.pairwise(arrivals)),
        bytes_up=stats.bytes_up if contender.split else generator.bytes_up - up,
        bytes_down=stats.bytes_down if contender.split else generator.bytes_down - down,
        seconds_by_cause=seconds,
        other_clamped=clamped,
        margins=tuple(margin for chunk in chunks for margin in chunk.margins),
        **frozen,
    )
