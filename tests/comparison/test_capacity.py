"""How many clients one target serves: interpolated, held against the law, and measured with real servers."""

from __future__ import annotations

from typing import Any, cast

import pytest

from tandem.cli.compare import build_config
from tandem.cli.compare_flags import build_parser
from tandem.comparison.analysis.capacity import law_of, most_clients
from tandem.comparison.analysis.summary import summarize
from tandem.comparison.analysis.verdict import trips_per_token
from tandem.comparison.measuring.architectures import Load, plan
from tandem.comparison.measuring.config import CLIENTS, ComparisonConfig
from tandem.comparison.measuring.load_runs import measure_loads
from tandem.comparison.measuring.records import Record
from tandem.comparison.measuring.timed_request import Contender
from tests.comparison.fakes import ASKED, FakeGenerator, prompt, record

MEASURED = ((1, 0.020, 50.0), (4, 0.040, 100.0), (8, 0.080, 100.0))


def config(*flags: str) -> ComparisonConfig:
    return build_config(build_parser().parse_args(["--prompt", "one", *flags]))


@pytest.mark.parametrize(
    ("bound_s", "clients", "rate"), [(0.010, 0.0, None), (0.060, 6.0, 100.0), (0.030, 2.5, 75.0), (0.080, 8.0, 100.0)]
)
def test_the_most_clients_lie_where_the_percentile_crosses_the_bound(
    bound_s: float, clients: float, rate: float | None
) -> None:
    assert most_clients(bound_s, MEASURED) == pytest.approx((clients, rate))


def test_the_law_and_the_trips_of_a_token_are_those_of_the_measured_rounds() -> None:
    """Twenty rounds, five with a draft, of a token and a half; those of the first have no time."""
    rounds = {"rounds": 20, "accepted": 10, "drafted": 15, "output_tokens": 30, "drafted_per_position": (5, 5, 5)}
    apart = summarize("distributed", [record("distributed", **rounds)], None)
    asking = summarize("remote_draft", [record("remote_draft", **rounds)], None)
    counted = (30 - 1.5) / 29  # of TPOT's tokens: some came with the first round
    assert trips_per_token(apart) == pytest.approx(counted / 1.5)
    assert trips_per_token(asking) == pytest.approx(counted / 1.5 * 5 / 20)
    assert trips_per_token(summarize("fused", [record("fused", drafted=0)], None)) is None
    assert law_of(apart) == pytest.approx(1 + 0.1 / 0.2)


def test_a_capacity_measures_from_one_to_64_clients_in_order_unless_told() -> None:
    assert [load.concurrency for load in config("--capacity", "50").loads] == [*CLIENTS]
    loads = config("--capacity", "50", "--concurrency", "4,1").loads
    assert [(load.concurrency, load.requests) for load in loads] == [(1, 8), (4, 16)]


async def test_every_user_asks_a_draft_of_its_own() -> None:
    first, second, third = generators = [FakeGenerator(name) for name in ("first", "second", "third")]
    contender = Contender("distributed", cast(Any, first), own=cast(Any, (second, third)))
    asked = [(0, prompt(f"p{number}")) for number in range(6)]
    condition = plan(ASKED)[0].under(Load(6, concurrency=3))
    records = list[Record]()
    await measure_loads([contender], asked, [condition], 0, lambda name, load: None, records.append)
    assert len(records) == 6 and all(len(generator.calls) > 1 for generator in generators[1:])
    assert {name for name, _ in second.calls} == {"second"}
