"""The record of one request as measured at the client; all metrics derive from it."""

from __future__ import annotations

from dataclasses import dataclass, fields

from tandem.comparison.measuring.machine import MachineLoad
from tandem.speculation.types import SpeculationStats


@dataclass(frozen=True, slots=True)
class Seconds:
    draft: float
    verify: float
    queue: float
    network: float
    prefill: float
    other: float  # the remainder: tokenization, RPC, streaming


CAUSES: tuple[str, ...] = tuple(f.name for f in fields(Seconds))


def attribute_seconds(end_to_end_s: float, stats: SpeculationStats) -> tuple[Seconds, bool]:
    """Returns the seconds by cause, and whether `other` was clamped at 0 since causes overlapped."""
    named = (
        stats.draft_seconds,
        stats.verify_seconds,
        stats.queue_seconds,
        stats.network_seconds,
        stats.prefill_seconds,
    )
    rest = end_to_end_s - sum(named)
    return Seconds(*named, max(rest, 0.0)), rest < 0


@dataclass(frozen=True, slots=True)
class Measurement:
    output_token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    number_input_tokens: int
    output_tokens: int
    ttft_s: float  # from sending to the first chunk with tokens
    tpot_s: float | None  # (E2E - TTFT) / (n - 1), None if n < 2
    inter_token_latency_s: float  # LLMPerf's: time to the last token / n
    end_to_end_latency_s: float
    request_output_throughput_token_per_s: float | None
    chunk_tokens: tuple[int, ...]
    chunk_gaps_s: tuple[float, ...]  # a round is one chunk
    rounds: int
    drafted: int
    accepted: int
    accepted_per_position: tuple[int, ...]
    drafted_per_position: tuple[int, ...]
    drafted_by: dict[str, int]
    accepted_by: dict[str, int]
    bytes_up: int  # protobuf payload between draft and target, or client and server
    bytes_down: int
    seconds_by_cause: Seconds
    other_clamped: bool
    stale_rounds: int = 0
    stale_drafts: int = 0
    guessed_rounds: int = 0
    sent_by_depth: tuple[int, ...] = ()
    run_steps: int = 0
    wasted_steps: int = 0
    margins: tuple[float, ...] = ()  # of a repetition for them


@dataclass(frozen=True, slots=True)
class Failure:
    code: str
    message: str


def failure_of(error: Exception) -> Failure:
    """Returns a client error's code and message; other errors have their type as code."""
    code = getattr(error, "code", type(error).__name__)
    return Failure(str(code), str(getattr(error, "message", error)))


@dataclass(frozen=True, slots=True)
class Record:
    """The result of one architecture, prompt and run under one condition."""

    architecture: str
    prompt: str
    workload: str
    run: int
    measurement: Measurement | None = None
    error: Failure | None = None
    condition: str = "base"
    sent_s: float | None = None  # since the load began; None without a load
    ended_s: float | None = None
    machine_load: MachineLoad | None = None
