"""The measuring loop, with generators that answer in process."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from tandem.comparison.measuring.conditions import Condition, plan
from tandem.comparison.measuring.records import Record
from tandem.comparison.measuring.run import (
    Contender,
    measure,
    measure_all,
    rotated,
    trace_margins,
    warm_up,
)
from tandem.speculation.types import GenerationRequest, SamplingParams, SpeculationStats
from tests.comparison.fakes import FakeGenerator, prompt

REQUEST = GenerationRequest(
    text="",
    sampling=SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, seed=42),
    max_new_tokens=16,
    speculation_length=3,
    adapter="sql",
)
CONDITIONS = plan(REQUEST)


def three(calls: list[tuple[str, GenerationRequest]]) -> list[Contender]:
    return [Contender(name, FakeGenerator(name, calls=calls)) for name in "abc"]


def test_architectures_take_turns_on_every_prompt_and_the_first_place_rotates() -> None:
    calls: list[tuple[str, GenerationRequest]] = []
    prompts = [prompt("one"), prompt("two")]
    asyncio.run(measure_all(three(calls), prompts, 2, CONDITIONS))
    assert "".join(name for name, _ in calls) == "abc" + "bca" + "cab" + "abc"
    assert [request.text for _, request in calls[:4]] == ["text of one"] * 3 + ["text of two"]


def test_before_each_request_is_said_which_turn_it_is_so_that_all_meet_the_same_link() -> None:
    calls, said = list[tuple[str, GenerationRequest]](), list[tuple[float, int]]()

    async def before(condition: Condition, share: float) -> None:
        assert condition is CONDITIONS[0]
        said.append((share, len(calls)))

    prompts = [prompt("one"), prompt("two")]
    asyncio.run(measure_all(three(calls), prompts, 2, CONDITIONS, before))
    assert said == [(turn / 4, 3 * turn + place) for turn in range(4) for place in range(3)]


def test_every_architecture_goes_first_equally_often() -> None:
    contenders = three([])
    first = [rotated(contenders, turn)[0].name for turn in range(12)]
    assert {name: first.count(name) for name in "abc"} == {"a": 4, "b": 4, "c": 4}


def test_every_architecture_gets_the_same_request_with_every_sampling_flag() -> None:
    calls: list[tuple[str, GenerationRequest]] = []
    asyncio.run(measure_all(three(calls), [prompt("one")], 1, CONDITIONS))
    requests = {request for _, request in calls}
    assert requests == {replace(REQUEST, text="text of one")}


def test_a_measurement_adds_up() -> None:
    stats = SpeculationStats(3, 9, 2, [2, 0, 0], [3, 3, 3], drafted_by={"model": 9}, accepted_by={"model": 2})
    found = asyncio.run(measure(Contender("fused", FakeGenerator("fused", stats=stats)), prompt("x").into(REQUEST)))
    assert found.output_token_ids == (1, 2, 3, 4, 5)
    assert found.chunk_tokens == (2, 1, 2)
    assert len(found.chunk_gaps_s) == 2
    assert found.tpot_s == pytest.approx((found.end_to_end_latency_s - found.ttft_s) / 4)
    assert found.request_output_throughput_token_per_s == pytest.approx(5 / found.end_to_end_latency_s)
    assert found.inter_token_latency_s == pytest.approx((found.ttft_s + sum(found.chunk_gaps_s)) / 5)
    assert (found.rounds, found.drafted, found.accepted, found.accepted_per_position) == (3, 9, 2, (2, 0, 0))
    assert (found.drafted_by, found.accepted_by) == ({"model": 9}, {"model": 2})
    assert found.text == "<2><1><2>"


def test_a_chunk_without_tokens_is_not_the_first_token() -> None:
    generator = FakeGenerator("fused", chunks=((), (1, 2)))
    found = asyncio.run(measure(Contender("fused", generator), prompt("x").into(REQUEST)))
    assert found.chunk_tokens == (2,)
    assert found.chunk_gaps_s == ()


def test_one_token_has_no_time_per_output_token() -> None:
    generator = FakeGenerator("fused", chunks=((1,),))
    found = asyncio.run(measure(Contender("fused", generator), prompt("x").into(REQUEST)))
    assert found.tpot_s is None


def test_bytes_are_the_clients_own_unless_draft_and_target_are_apart() -> None:
    stats = SpeculationStats(bytes_up=1234, bytes_down=5678)
    request = prompt("x").into(REQUEST)
    beside = asyncio.run(measure(Contender("fused", FakeGenerator("fused", stats=stats)), request))
    assert (beside.bytes_up, beside.bytes_down) == (100, 30)
    apart = asyncio.run(measure(Contender("distributed", FakeGenerator("d", stats=stats), split=True), request))
    assert (apart.bytes_up, apart.bytes_down) == (1234, 5678)


def records_of(contender: Contender, *names: str) -> list[Record]:
    return asyncio.run(measure_all([contender], [prompt(name) for name in names], 1, CONDITIONS))


def test_a_failure_is_recorded_and_the_run_goes_on() -> None:
    failed, fine = records_of(Contender("fused", FakeGenerator("fused", fail_on="one")), "one", "two")
    assert failed.measurement is None
    assert failed.error is not None
    assert (failed.error.code, failed.error.message) == ("UNAVAILABLE", "the server is gone")
    assert fine.measurement is not None


def test_a_stream_without_a_completion_is_a_failure() -> None:
    (found,) = records_of(Contender("fused", FakeGenerator("fused", without_completion=True)), "one")
    assert found.error is not None
    assert found.error.code == "INCOMPLETE_STREAM"


def test_a_stream_without_tokens_is_a_failure() -> None:
    (found,) = records_of(Contender("fused", FakeGenerator("fused", chunks=())), "one")
    assert found.error is not None
    assert found.error.code == "INCOMPLETE_STREAM"


def test_a_cancelled_run_is_not_recorded_as_a_failure() -> None:
    class Cancelled(FakeGenerator):
        def generate(self, request: GenerationRequest, timeout: float | None = None):  # type: ignore[no-untyped-def]
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        records_of(Contender("fused", Cancelled("fused")), "one")


def test_warm_up_sends_one_short_request_to_each_and_reports_failures() -> None:
    calls: list[tuple[str, GenerationRequest]] = []
    contenders = [*three(calls), Contender("bad", FakeGenerator("bad", calls=calls, fail_on="one"))]
    failures = asyncio.run(warm_up(contenders, prompt("one"), REQUEST))
    assert [name for name, _ in calls] == ["a", "b", "c", "bad"]
    assert {request.max_new_tokens for _, request in calls} == {8}
    assert list(failures) == ["bad"]


def test_margins_are_asked_for_in_a_pass_of_their_own() -> None:
    generator = FakeGenerator("autoregressive", margins=(5.0, 4.0, 3.0, 2.0, 1.0))
    contender = Contender("autoregressive", generator)
    asyncio.run(measure(contender, prompt("one").into(REQUEST)))
    assert not generator.calls[0][1].margins
    traces = asyncio.run(trace_margins(contender, [prompt("one")], REQUEST))
    assert generator.calls[1][1].margins
    assert traces["code/one"].token_ids == (1, 2, 3, 4, 5)
    assert traces["code/one"].margins == (5.0, 4.0, 3.0, 2.0, 1.0)


def test_margins_that_cannot_be_had_are_left_out() -> None:
    contender = Contender("autoregressive", FakeGenerator("autoregressive", fail_on="one"))
    assert asyncio.run(trace_margins(contender, [prompt("one")], REQUEST)) == {}
