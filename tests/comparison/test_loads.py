"""Loads: who asks when, what is asked, and what is decided; with generators that answer in process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from tandem.comparison.analysis.summary import summarize
from tandem.comparison.analysis.verdict import Decision, loaded_decision
from tandem.comparison.links.link_settings import LinkSettings
from tandem.comparison.measuring.architectures import Condition, Load
from tandem.comparison.measuring.config import ComparisonConfig
from tandem.comparison.measuring.load_runs import arrivals, load_turns, measure_loads
from tandem.comparison.measuring.records import Failure, Record
from tandem.comparison.measuring.timed_request import Contender
from tandem.comparison.measuring.workloads import Prompt
from tandem.speculation.types import Chunk, GenerationEnd, GenerationRequest
from tests.comparison.fakes import ASKED, FakeGenerator, prompt, record

BASE = Condition("base", "base", LinkSettings(), replace(ASKED, max_new_tokens=16))


class Words:
    """Encodes each character as its code."""

    sha256 = "words"

    def encode(self, text: str, chat: bool) -> list[int]:
        return list(map(ord, text))


def config(**changes: object) -> ComparisonConfig:
    settings = ComparisonConfig(
        prompts=(prompt("one"), prompt("two", "prose"), prompt("three")),
        output_dir=Path("nowhere"),
        concurrency=(1,),
        max_new_tokens=16,
        seed=7,
    )
    return replace(settings, **changes)  # type: ignore[arg-type]


def asked(count: int, of: ComparisonConfig | None = None) -> Sequence[tuple[int, Prompt]]:
    return load_turns(of or config(), count, Words())


@dataclass
class Counting(FakeGenerator):
    """Notes how many requests are under way together; each lasts a few turns of the event loop."""

    counts: list[int] = field(default_factory=lambda: [0, 0])

    async def generate(
        self, request: GenerationRequest, timeout: float | None = None
    ) -> AsyncIterator[Chunk | GenerationEnd]:
        self.counts[0] += 1
        self.counts[1] = max(self.counts)
        for _ in range(3):
            await asyncio.sleep(0)
        async for event in super().generate(request, timeout):
            yield event
        self.counts[0] -= 1


def measured(*conditions: Condition, contenders: list[Contender], count: int = 6, seed: int = 0) -> list[Record]:
    records: list[Record] = []
    asyncio.run(measure_loads(contenders, asked(count), conditions, seed, lambda name, load: None, records.append))
    return records


def test_a_closed_loop_has_as_many_requests_under_way_as_users_and_answers_all() -> None:
    generator = Counting("fused")
    records = measured(BASE.under(Load(7, concurrency=3)), contenders=[Contender("fused", generator)], count=7)
    assert generator.counts[1] == 3
    assert sorted((r.prompt, r.run) for r in records) == sorted((p.name, run) for run, p in asked(7))
    assert {r.condition for r in records} == {"concurrency 3"}
    assert all(r.sent_s is not None and r.ended_s is not None and 0 <= r.sent_s <= r.ended_s for r in records)


def test_an_open_loop_sends_at_the_arrivals_whether_or_not_others_were_answered() -> None:
    records = measured(BASE.under(Load(6, rate=500.0)), contenders=[Contender("fused", FakeGenerator("fused"))])
    times = arrivals(500.0, 6, 0)
    assert all(r.sent_s is not None and r.sent_s >= at for r, at in zip(records, times, strict=True))


def test_arrivals_are_poisson_and_the_same_for_equal_seeds() -> None:
    many = arrivals(4.0, 4000, 1)
    assert many == arrivals(4.0, 4000, 1) != arrivals(4.0, 4000, 2)
    gaps = [b - a for a, b in zip((0.0, *many), many, strict=False)]
    mean = sum(gaps) / len(gaps)
    spread = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert mean == pytest.approx(1 / 4, rel=0.05)
    assert spread == pytest.approx(mean, rel=0.05)  # of an exponential distribution the two are equal


def test_every_architecture_gets_the_same_requests_and_the_first_place_rotates() -> None:
    calls: list[tuple[str, GenerationRequest]] = []
    contenders = [Contender(name, FakeGenerator(name, calls=calls)) for name in "ab"]
    conditions = [BASE.under(Load(3, concurrency=1)), BASE.under(Load(3, concurrency=2))]
    measured(*conditions, contenders=contenders, count=3)
    timed = [(name, request.text) for name, request in calls if request.max_new_tokens == 16]
    assert "".join(name for name, _ in timed) == "aaa" + "bbb" + "bbb" + "aaa"
    assert [text for name, text in timed if name == "a"] == [text for name, text in timed if name == "b"]


def test_bytes_of_a_request_are_its_own_although_others_run_beside_it() -> None:
    records = measured(BASE.under(Load(6, concurrency=3)), contenders=[Contender("fused", Counting("fused"))])
    assert {(r.measurement.bytes_up, r.measurement.bytes_down) for r in records if r.measurement} == {(100, 30)}


def test_prompts_are_cut_to_exactly_the_drawn_length_and_outputs_ignore_the_end() -> None:
    of = config(mean_input_tokens=40, stddev_input_tokens=10, mean_output_tokens=20, stddev_output_tokens=5)
    found = asked(200, of)
    requests = [each.into(ASKED, run) for run, each in found]
    inputs = [len(request.token_ids or ()) for request in requests]
    outputs = [request.max_new_tokens or 0 for request in requests]
    assert sum(inputs) / 200 == pytest.approx(40, abs=3) and len(set(inputs)) > 10
    assert sum(outputs) / 200 == pytest.approx(20, abs=2) and len(set(outputs)) > 5
    assert all(request.ignore_end_of_sequence and request.text is None for request in requests)
    assert found == asked(200, of) != asked(200, replace(of, seed=1))
    assert len({each.name for _, each in found}) == 200
    assert "".join(map(chr, requests[1].token_ids or ())).startswith("text of two\n\ntext of three")


@pytest.mark.parametrize("sequence_length", [12, 20, 200])
def test_no_draw_exceeds_the_sequence(sequence_length: int) -> None:
    of = config(
        mean_input_tokens=6, stddev_input_tokens=6, mean_output_tokens=6, stddev_output_tokens=6,
        sequence_length=sequence_length, max_new_tokens=4,
    )  # fmt: skip
    for _, one in asked(300, of):
        assert one.token_ids and one.new_tokens and len(one.token_ids) + one.new_tokens <= sequence_length


def loaded(architecture: str, name: str, sent: float, ended: float, tokens: int = 10, users: int = 2) -> Record:
    found = record(architecture, name, output_tokens=tokens, end_to_end_latency_s=ended - sent, tpot_s=0.01)
    return replace(found, condition=f"concurrency {users}", sent_s=sent, ended_s=ended)


def decided(*records: Record, requests: int = 2, users: int = 2) -> Decision | None:
    condition = BASE.under(load := Load(requests, concurrency=users))
    names = dict.fromkeys(record.architecture for record in records)
    summaries = [summarize(name, records, "autoregressive") for name in names]
    return loaded_decision(condition, load, summaries, records)


def test_figures_are_over_the_time_from_the_first_request_to_the_last_end() -> None:
    failed = replace(loaded("fused", "c", 1.0, 5.0), measurement=None, error=Failure("UNAVAILABLE", "gone"))
    records = [loaded("fused", "a", 1.0, 2.0), loaded("fused", "b", 1.5, 4.0, 30), failed]
    found = summarize("fused", records, None)
    assert (found.requests, found.failed) == (3, 1)
    assert found.num_completed_requests_per_minute == 30.0
    assert found.mean_output_throughput_token_per_s == 10.0
    assert found.error_code_frequency == {"UNAVAILABLE": 1}


def test_the_most_tokens_per_second_decide_a_load() -> None:
    found = decided(
        loaded("autoregressive", "a", 0.0, 2.0), loaded("autoregressive", "b", 0.0, 2.0),
        loaded("fused", "a", 0.0, 1.0), loaded("fused", "b", 0.0, 1.0),
    )  # fmt: skip
    assert found is not None and (found.architecture, found.ratio, found.sureness) == ("fused", 2.0, "weak")
    said = "draft and target in one server: 2.00 times the tokens per second of plain decoding."
    assert found.sentence == f"With 2 at once, use fused, {said}"


def test_among_equal_throughputs_the_least_latency_decides() -> None:
    found = decided(
        loaded("fused", "a", 0.0, 1.0), loaded("fused", "b", 1.0, 10.0),
        loaded("distributed", "a", 0.0, 1.0), loaded("distributed", "b", 9.0, 10.1),
    )  # fmt: skip
    assert found is not None and found.architecture == "distributed"
    assert found.sentence.startswith("With 2 at once, distributed or fused, too close to call")


def test_a_load_that_was_cut_short_is_not_decided() -> None:
    whole = [loaded("autoregressive", name, 0.0, 2.0) for name in "ab"]
    assert decided(*whole, loaded("fused", "a", 0.0, 1.0)) is None
