"""Measuring without load, with generators that answer in process."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tandem.comparison.links.link_settings import LinkSettings
from tandem.comparison.measuring.architectures import FUSED
from tandem.comparison.measuring.config import ComparisonConfig
from tandem.comparison.measuring.deployment import Endpoint
from tandem.comparison.measuring.driver import started
from tandem.comparison.measuring.measurement import CALIBRATION_TOKENS, CALIBRATIONS, Measuring
from tandem.comparison.measuring.progress import Progress
from tandem.comparison.measuring.record_log import RecordLog, RunData
from tandem.comparison.measuring.records import Record
from tandem.comparison.measuring.timed_request import Contender, measure
from tandem.speculation.types import GenerationRequest, SamplingParams, SpeculationStats
from tests.comparison.fakes import MODEL, FakeGenerator, prompt

SAMPLED = SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, seed=42)
REQUEST = GenerationRequest(text="", sampling=SAMPLED, max_new_tokens=16, speculation_length=3)
Calls = list[tuple[str, GenerationRequest]]


def run_of(folder: Path, contenders: list[Contender], *names: str, over: Any = None, **more: Any) -> RunData:
    """Measures the prompts of these names, over a link."""
    settings: dict[str, Any] = {"max_new_tokens": 16, "architectures": ("fused",), "speculation_length": 3}
    config = ComparisonConfig(tuple(map(prompt, names)), folder, **(settings | more))
    endpoints = [Endpoint(FUSED, "127.0.0.1:1", replace(MODEL, draft_name="d", max_speculation_length=5))]
    with RecordLog(started(config)) as log:
        progress = Progress(Console(quiet=True))
        asyncio.run(Measuring(config, endpoints, contenders, over, progress, log).run())
    return log.measured


def three(calls: Calls) -> list[Contender]:
    return [Contender(name, FakeGenerator(name, calls=calls)) for name in "abc"]


def test_every_architecture_gets_the_same_requests_in_turn_and_the_first_place_rotates(tmp_path: Path) -> None:
    calls: Calls = []
    run_of(tmp_path, three(calls), "one", "two", num_runs=2, temperature=(0.7,), top_k=5, top_p=0.9, min_p=0.1, seed=42)
    assert {request.max_new_tokens for _, request in calls[:3]} == {8}, "they warm servers up"
    measured = calls[3:]
    assert "".join(name for name, _ in measured) == "abc" + "bca" + "cab" + "abc"
    assert [request.text for _, request in measured[:4]] == ["text of one"] * 3 + ["text of two"]
    assert {request for _, request in measured[:3]} == {replace(REQUEST, text="text of one")}


def test_a_recorded_link_begins_at_the_turn_so_that_all_meet_the_same_stretch(tmp_path: Path) -> None:
    calls, begun = Calls(), list[tuple[float, int]]()

    class Link:
        settings = LinkSettings()

        async def set(self, settings: LinkSettings) -> None:
            begun.append((settings.trace_from, len(calls)))

        async def overhead(self) -> None:
            return None

    (path := tmp_path / "trace").write_text("1\n")
    run_of(tmp_path / "out", three(calls), "one", "two", over=Link(), num_runs=2, link=(f"trace:{path},{path}",))
    assert begun[2:] == [(turn / 4, 3 + 3 * turn + place) for turn in range(4) for place in range(3)]


def test_a_measurement_adds_up() -> None:
    stats = SpeculationStats(3, 9, 2, [2, 0, 0], [3, 3, 3], drafted_by={"model": 9}, accepted_by={"model": 2})
    generator = FakeGenerator("fused", ((), (1, 2), (3,), (4, 5)), stats)
    found = asyncio.run(measure(Contender("fused", generator), prompt("x").into(REQUEST)))
    assert found.output_token_ids == (1, 2, 3, 4, 5)
    assert found.chunk_tokens == (2, 1, 2), "a chunk without tokens is not the first token"
    assert len(found.chunk_gaps_s) == 2
    assert found.tpot_s == pytest.approx((found.end_to_end_latency_s - found.ttft_s) / 4)
    assert found.request_output_throughput_token_per_s == pytest.approx(5 / found.end_to_end_latency_s)
    assert found.inter_token_latency_s == pytest.approx((found.ttft_s + sum(found.chunk_gaps_s)) / 5)
    assert (found.rounds, found.drafted, found.accepted, found.accepted_per_position) == (3, 9, 2, (2, 0, 0))
    assert (found.drafted_by, found.accepted_by) == ({"model": 9}, {"model": 2})
    assert found.text == "<0><2><1><2>"
    one = asyncio.run(measure(Contender("fused", FakeGenerator("fused", ((1,),))), prompt("x").into(REQUEST)))
    assert one.tpot_s is None


def test_bytes_are_the_clients_own_unless_draft_and_target_are_apart() -> None:
    stats = SpeculationStats(bytes_up=1234, bytes_down=5678)
    request = prompt("x").into(REQUEST)
    beside = asyncio.run(measure(Contender("fused", FakeGenerator("fused", stats=stats)), request))
    assert (beside.bytes_up, beside.bytes_down) == (100, 30)
    apart = asyncio.run(measure(Contender("distributed", FakeGenerator("d", stats=stats), split=True), request))
    assert (apart.bytes_up, apart.bytes_down) == (1234, 5678)


def records_of(folder: Path, generator: FakeGenerator) -> list[Record]:
    return run_of(folder, [Contender("fused", generator)], "one").records


def test_a_failure_is_recorded_and_the_run_goes_on(tmp_path: Path) -> None:
    found = run_of(tmp_path, [Contender("fused", FakeGenerator("fused", fail_on="one"))], "one", "two")
    failed, fine = found.records
    assert failed.measurement is None and failed.error == found.warm_up_failures["fused"]
    assert (failed.error.code, failed.error.message) == ("UNAVAILABLE", "the server is gone")
    assert fine.measurement is not None


@pytest.mark.parametrize("broken", [{"without_completion": True}, {"chunks": ()}])
def test_a_stream_without_a_completion_or_tokens_is_a_failure(broken: dict[str, Any], tmp_path: Path) -> None:
    (found,) = records_of(tmp_path, FakeGenerator("fused", **broken))
    assert found.error is not None and found.error.code == "INCOMPLETE_STREAM"


def test_a_cancelled_run_is_not_recorded_as_a_failure(tmp_path: Path) -> None:
    class Cancelled(FakeGenerator):
        def generate(self, request: GenerationRequest, timeout: float | None = None):  # type: ignore[no-untyped-def]
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        records_of(tmp_path, Cancelled("fused"))


def test_margins_of_diverged_prompts_that_cannot_be_had_cost_nothing_else(tmp_path: Path) -> None:
    class Plain(FakeGenerator):
        async def generate(self, request: GenerationRequest, timeout: float | None = None):  # type: ignore[no-untyped-def]
            async for event in super().generate(request, timeout):
                if request.margins:
                    raise ValueError("no margins")
                yield event

    plain = Plain("autoregressive", margins=(5.0, 4.0, 3.0, 2.0, 1.0))
    other = FakeGenerator("fused", ((1, 2, 8, 4, 5),))
    contenders = [Contender("autoregressive", plain), Contender("fused", other)]
    run = run_of(tmp_path, contenders, "one", architectures=("autoregressive", "fused"))
    assert len(run.records) == 2 and not run.margins
    assert [request.margins for _, request in plain.calls].count(True) == 1


@pytest.mark.parametrize("count", [1, 4, 20])
def test_every_length_is_calibrated_often_enough_by_short_requests_however_few_the_prompts(
    count: int, tmp_path: Path
) -> None:
    calls: Calls = []
    names = ("autoregressive", "fused")
    contenders = [Contender(name, FakeGenerator(name, calls=calls, fail_on="p99")) for name in names]
    found = run_of(tmp_path, contenders, *(f"p{i}" for i in range(count)), architectures=names, max_new_tokens=64)
    assert len(found.calibrations["autoregressive"][0]) == count
    assert all(len(found.calibrations["fused"][length]) >= CALIBRATIONS for length in range(1, 6))
    assert {request.max_new_tokens for _, request in calls} == {8, 64, CALIBRATION_TOKENS}


def test_plain_decoding_and_drafts_of_known_cost_are_needed_for_step_times() -> None:
    def calibrates(*names: str, **more: Any) -> bool:
        return ComparisonConfig((prompt("a"),), Path("nowhere"), architectures=names, **more).calibrates

    assert calibrates("autoregressive", "fused") and not calibrates("autoregressive", "fused", speculation_length=0)
    assert not calibrates("fused", "distributed") and not calibrates("autoregressive", "lookup")
