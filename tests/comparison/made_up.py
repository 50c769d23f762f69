"""Comparisons as any machine might have measured them: any times that are not negative, any counts that add up."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from hypothesis import strategies as st

from tandem.comparison.links.link import LinkOverhead
from tandem.comparison.measuring.architectures import CONNECTABLE, PIPELINED, PLAIN, WIDTH_1
from tandem.comparison.measuring.config import ComparisonConfig
from tandem.comparison.measuring.deployment import Endpoint
from tandem.comparison.measuring.machine import Machine
from tandem.comparison.measuring.record_log import RunData
from tandem.comparison.measuring.records import Failure, Measurement, Record, Seconds
from tandem.speculation.types import Rule
from tests.comparison.fakes import MEASUREMENT, MODEL, prompt

NAMES = tuple(CONNECTABLE)
TIMES = st.one_of(st.just(0.0), st.sampled_from((5e-324, 1e-300, 1e-9, 1.0)), st.floats(0, 1e5))
POOLS = st.lists(TIMES, min_size=1, max_size=8)


@dataclass(frozen=True)
class Shape:
    """What of a comparison is varied. `keep`: of everything that could be measured, the share that was."""

    names: tuple[str, ...] = NAMES
    prompts: int = 2
    runs: int = 1
    rtts: tuple[float, ...] = ()
    temperatures: tuple[float, ...] = ()
    rules: tuple[Rule, ...] = (Rule.AGREEMENT,)
    concurrency: tuple[int, ...] = ()
    rate: tuple[float, ...] = ()
    load_requests: int = 1
    length: int | None = 3
    longest_answer: int = 3
    failing: float = 0.0
    calibrated: float = 1.0
    keep: float = 1.0


SHAPES = st.builds(
    Shape,
    st.lists(st.sampled_from(NAMES), min_size=1, max_size=len(NAMES), unique=True).map(tuple),
    st.integers(1, 4),
    st.integers(1, 2),
    st.sampled_from(((), (0.0,), (0.0, 20.0), (50.0, 0.0, 20.0))),
    st.sampled_from(((), (0.0, 0.8))),
    st.sampled_from(((Rule.AGREEMENT,), (Rule.AGREEMENT, Rule.REJECTION))),
    st.sampled_from(((), (1,), (1, 4))),
    st.sampled_from(((), (0.5,), (100.0, 2.0))),
    st.integers(1, 5),
    st.sampled_from((None, 0, 1, 3)),
    st.integers(1, 4),
    st.sampled_from((0.0, 0.3, 1.0)),
    st.sampled_from((0.0, 0.3, 1.0)),
    st.floats(0.01, 1.0),
)


def measured(shape: Shape, times: Sequence[float], random: Random, folder: Path) -> RunData:
    """Every time is one of `times`."""
    config = ComparisonConfig(
        prompts=tuple(prompt(f"p{i}", ("code", "prose")[i % 2]) for i in range(shape.prompts)),
        output_dir=folder,
        architectures=tuple(name for name in shape.names if name != WIDTH_1.name) or ("fused",),
        num_runs=shape.runs,
        rtt_ms=shape.rtts,
        temperature=shape.temperatures or (0.0,),
        rule=shape.rules,
        concurrency=shape.concurrency,
        rate=shape.rate,
        max_num_completed_requests=shape.load_requests if shape.concurrency or shape.rate else None,
        speculation_length=shape.length,
        head="a head",
    )
    endpoints = tuple(
        Endpoint(CONNECTABLE[n], f"127.0.0.1:{i}", replace(MODEL, draft_name="" if n in PLAIN else "toy"))
        for i, n in enumerate(shape.names, 1)
    )
    made = RunData(
        config, Machine("Linux", "x86_64", "a processor", 2, None, "3.11"), "2026-01-01T00:00:00+00:00",
        endpoints, ended=True, cut_short=None if shape.keep == 1 else "interrupted by SIGINT",
    )  # fmt: skip
    for condition in config.conditions:
        if condition.link.rtt_ms is not None:
            made.links[condition.link] = LinkOverhead(condition.link.seconds, *(random.choice(times) for _ in "123"), 9)
    turns = itertools.product(range(shape.runs), config.prompts, config.conditions, shape.names)

    def record(name: str, asked: str, kind: str, run: int, condition: str) -> Record:
        made = Record(name, asked, kind, run, condition=condition)
        if random.random() < shape.failing:
            return replace(made, error=Failure("UNAVAILABLE", "gone"))
        return replace(made, measurement=request(name, shape.length or 2, shape.longest_answer, times, random))

    everything = [record(name, asked.name, asked.kind, run, condition.name) for run, asked, condition, name in turns]
    everything += [
        loaded(record(name, asked.name, asked.kind, run, condition.name), times, random)
        for condition in config.load_conditions
        for name in shape.names
        for run, asked in itertools.product(range(shape.load_requests), config.prompts)
        if run * len(config.prompts) + config.prompts.index(asked) < shape.load_requests
    ]
    made.records = everything[: max(1, round(shape.keep * len(everything)))]
    for name in shape.names:
        for length in (0,) if name in PLAIN else range(1, 6):
            for _ in range(2):
                if name != PIPELINED.name and random.random() < shape.calibrated:
                    found = request(name, length, shape.longest_answer, times, random)
                    made.add("calibration", name, length, found)
    made.margins["base", "code/p0"] = replace(MEASUREMENT, output_token_ids=(1, 2), margins=(0.5, 0.0))
    return made


def loaded(of: Record, times: Sequence[float], random: Random) -> Record:
    """A record of a load: sent and ended at any time, in this order."""
    sent = random.choice(times)
    return replace(of, sent_s=sent, ended_s=sent + random.choice(times))


def request(name: str, length: int, rounds: int, times: Sequence[float], random: Random) -> Measurement:
    """One request of 1 to `rounds` rounds, of which each accepts what it likes."""
    length = 0 if name in PLAIN else length
    accepted = [random.randint(0, length) for _ in range(random.randint(1, rounds))]
    tokens = len(accepted) + sum(accepted)
    ttft, gaps = random.choice(times), [random.choice(times) for _ in accepted[1:]]
    whole = ttft + sum(gaps) + random.choice((0.0, random.choice(times)))
    at = tuple(sum(a > i for a in accepted) for i in range(length))
    return Measurement(
        output_token_ids=tuple(random.choice((1, 1, 1, 2)) for _ in range(tokens)),
        text="text",
        finish_reason="length",
        number_input_tokens=9,
        output_tokens=tokens,
        ttft_s=ttft,
        tpot_s=(whole - ttft) / (tokens - 1) if tokens > 1 else None,
        inter_token_latency_s=(ttft + sum(gaps)) / tokens,
        end_to_end_latency_s=whole,
        request_output_throughput_token_per_s=None,
        chunk_tokens=tuple(a + 1 for a in accepted),
        chunk_gaps_s=tuple(gaps),
        rounds=len(accepted),
        drafted=len(accepted) * length,
        accepted=sum(accepted),
        accepted_per_position=at,
        drafted_per_position=(len(accepted),) * length,
        drafted_by={"model": len(accepted) * length} if length else {},
        accepted_by={"model": sum(accepted)} if length else {},
        bytes_up=random.choice((0, 30)),
        bytes_down=random.choice((0, 20)),
        seconds_by_cause=Seconds(*(random.choice(times) for _ in range(6))),
        other_clamped=random.random() < 0.1,
        sent_by_depth=(len(accepted),) if name == PIPELINED.name else (),
    )
