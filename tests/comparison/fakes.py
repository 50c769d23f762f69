"""In-process stand-ins for what a comparison talks to. Nothing here listens, loads or sleeps for long."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tandem.comparison.measuring.architectures import CONNECTABLE
from tandem.comparison.measuring.config import ComparisonConfig
from tandem.comparison.measuring.deployment import Endpoint
from tandem.comparison.measuring.machine import Machine
from tandem.comparison.measuring.record_log import RunData
from tandem.comparison.measuring.records import Measurement, Record, Seconds
from tandem.comparison.measuring.workloads import Prompt
from tandem.speculation.types import Chunk, FinishReason, GenerationEnd, GenerationRequest, ModelInfo, SpeculationStats

ASKED = GenerationRequest(text="")
MODEL = ModelInfo("toy", "rev", "sha", 100, 512, 8, 4, "float32", "toy", "toy")


def prompt(name: str, kind: str = "code") -> Prompt:
    return Prompt(f"{kind}/{name}", kind, f"text of {name}", chat=False)


@dataclass
class FakeGenerator:
    """Answers every request with the same chunks. Bytes: 100 up, 10 down per chunk."""

    name: str
    chunks: Sequence[tuple[int, ...]] = ((1, 2), (3,), (4, 5))
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    calls: list[tuple[str, GenerationRequest]] = field(default_factory=list)
    fail_on: str | None = None
    without_completion: bool = False
    margins: tuple[float, ...] = ()
    model: ModelInfo = MODEL
    bytes_up: int = 7
    bytes_down: int = 7

    async def generate(
        self, request: GenerationRequest, timeout: float | None = None
    ) -> AsyncIterator[Chunk | GenerationEnd]:
        self.calls.append((self.name, request))
        self.bytes_up += 100
        if self.fail_on is not None and self.fail_on in (request.text or ""):
            raise FakeError("UNAVAILABLE", "the server is gone")
        position = 0
        for ids in self.chunks:
            self.bytes_down += 10
            margins = self.margins[position : position + len(ids)] if request.margins else ()
            position += len(ids)
            yield Chunk(ids, f"<{len(ids)}>", margins)
        if not self.without_completion:
            yield GenerationEnd(FinishReason.LENGTH, 9, position, self.stats)

    def sharing(self) -> FakeGenerator:
        return replace(self, bytes_up=0, bytes_down=0)

    async def model_info(self, wait: bool = True) -> ModelInfo:
        return self.model

    async def __aenter__(self) -> FakeGenerator:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass


class FakeError(ValueError):
    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


MEASUREMENT = Measurement(
    output_token_ids=(1, 2, 3),
    text="abc",
    finish_reason="length",
    number_input_tokens=9,
    output_tokens=3,
    ttft_s=1.0,
    tpot_s=0.5,
    inter_token_latency_s=0.6,
    end_to_end_latency_s=2.0,
    request_output_throughput_token_per_s=1.5,
    chunk_tokens=(2, 1),
    chunk_gaps_s=(1.0,),
    rounds=2,
    drafted=4,
    accepted=1,
    accepted_per_position=(1, 0),
    drafted_per_position=(2, 2),
    drafted_by={"ngram": 1, "model": 3},
    accepted_by={"ngram": 1, "model": 0},
    bytes_up=30,
    bytes_down=60,
    seconds_by_cause=Seconds(0.1, 0.2, 0.3, 0.4, 0.5, 0.5),
    other_clamped=False,
)


def record(architecture: str, name: str = "a", run: int = 0, kind: str = "code", **changes: Any) -> Record:
    return Record(architecture, f"{kind}/{name}", kind, run, replace(MEASUREMENT, **changes))


def run_of(records: Sequence[Record], connect: Mapping[str, str] | None = None) -> RunData:
    """A whole run with these records, in this order, on a machine of two cores; servers in `connect` ran already."""
    connect = connect or {}
    names = dict.fromkeys(record.architecture for record in records)
    endpoints = tuple(
        Endpoint(CONNECTABLE[name], connect.get(name, "127.0.0.1:1"), MODEL, None if name in connect else Path("log"))
        for name in names
    )
    prompts = tuple(Prompt(name, "code", "text", False) for name in dict.fromkeys(r.prompt for r in records))
    config = ComparisonConfig(prompts, Path("nowhere"), architectures=tuple(names), connect=connect, head="a head")
    machine = Machine("Linux", "x86_64", "a processor", 2, None, "3.11")
    return RunData(config, machine, "2026-01-01T00:00:00+00:00", endpoints, records=list(records), ended=True)
