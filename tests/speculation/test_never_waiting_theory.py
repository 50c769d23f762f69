"""The theory of a verifier that never waits: the table that it was first argued with, and the formula's error."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.speculation.never_waiting_theory import RunCosts, Undrafted, plain_steps, steps_late, tpot_never_waiting
from tandem.speculation.theory import StepCosts, tpot_pipelined
from tests.daily import daily
from tests.speculation.run_simulation import simulate_never_waiting, simulate_stop_and_wait

RANKS = Path(__file__).resolve().parent / "ranks"
EMBEDDED = (9.0, 0.3, 0.6)  # milliseconds: a step, a draft token, a row beyond eight
SECOND = (55.0, 0.6, 4.0)
STOP_AND_WAIT_LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)


def measured(name: str) -> list[list[int]]:
    """For every token that the embedded target committed, its rank in the embedded draft's order."""
    return [ranks for requests in json.loads((RANKS / f"{name}.json").read_text()).values() for ranks in requests]


def drawn(acceptance: float, tokens: int = 12000, length: int = 240) -> list[list[int]]:
    chance = random.Random(3)
    return [[0 if chance.random() < acceptance else 99 for _ in range(length)] for _ in range(tokens // length)]


def stepping(step: float, row: float) -> Callable[[int], float]:
    return lambda tokens: step * (1.0 if tokens <= 1 else 1.04) + max(0, tokens - 8) * row


def costs_of(pair: tuple[float, ...], rtt: float) -> RunCosts:
    step, draft, row = pair
    return RunCosts(draft, stepping(step, row), rtt)


def best_chain(sequences: list[list[int]], costs: RunCosts) -> float:
    found = [simulate_never_waiting(sequences, costs, k, w) for k in (4, 8, 16) for w in (3, 7)]
    return min(found)


@pytest.mark.parametrize(
    ("name", "pair", "rtt", "stop_and_wait", "bound", "never_waiting", "fused"),
    [
        ("greedy", EMBEDDED, 20, 14.6, 12.9, 7.3, 5.1),
        ("greedy", EMBEDDED, 50, 28.7, 26.0, 8.0, 5.1),
        ("greedy", EMBEDDED, 100, 51.6, 47.7, 8.4, 5.1),
        ("greedy", SECOND, 20, 37.9, 33.2, 35.6, 28.4),
        ("greedy", SECOND, 50, 52.0, 46.3, 36.3, 28.4),
        ("greedy", SECOND, 100, 75.4, 68.0, 41.0, 28.4),
        ("temperature-0.8", EMBEDDED, 20, 17.4, 16.2, 8.3, 6.0),
        ("temperature-0.8", EMBEDDED, 100, 62.3, 60.1, 8.7, 6.0),
        ("temperature-0.8", SECOND, 20, 45.1, 41.7, 42.8, 33.9),
        ("temperature-0.8", SECOND, 50, 62.0, 58.2, 43.1, 33.9),
        ("temperature-0.8", SECOND, 100, 90.1, 85.6, 47.9, 33.9),
    ],
)
def test_the_simulation_on_measured_ranks_gives_the_milliseconds_per_token_that_argued_for_never_waiting(
    name: str,
    pair: tuple[float, ...],
    rtt: float,
    stop_and_wait: float,
    bound: float,
    never_waiting: float,
    fused: float,
) -> None:
    sequences, costs = measured(name), costs_of(pair, rtt)
    hits = sum(ranks.count(0) for ranks in sequences) / sum(map(len, sequences))
    near = costs_of(pair, 0)
    assert min(simulate_stop_and_wait(sequences, costs, k) for k in STOP_AND_WAIT_LENGTHS) == pytest.approx(
        stop_and_wait, abs=0.051
    )
    assert tpot_pipelined(StepCosts(pair[1], pair[0], pair[0]), hits, rtt) == pytest.approx(bound, abs=0.051)
    assert best_chain(sequences, costs) == pytest.approx(never_waiting, abs=0.051)
    assert min(simulate_stop_and_wait(sequences, near, k) for k in range(1, 9)) == pytest.approx(fused, abs=0.051)


@pytest.mark.each_value
@pytest.mark.parametrize("acceptance", daily([0.0, 0.3, 0.6, 0.8, 0.9], 0, 2))
@pytest.mark.parametrize(("pair", "depths"), [(EMBEDDED, (8, 16, 24, 48)), (SECOND, (8, 16, 32))])
def test_the_formula_is_within_a_tenth_of_the_simulation_with_the_best_depth(
    acceptance: float, pair: tuple[float, ...], depths: tuple[int, ...]
) -> None:
    sequences = drawn(acceptance)
    for rtt in (0.0, 20.0, 40.0, 100.0):
        costs = costs_of(pair, rtt)
        simulated = {d: simulate_never_waiting(sequences, costs, d, 6, extends=True) for d in depths}
        best = min(simulated, key=simulated.__getitem__)
        assert tpot_never_waiting(costs, acceptance, 6, best) == pytest.approx(simulated[best], rel=0.1), rtt


def test_the_formula_rises_from_near_fused_decoding_to_plain_decoding_and_never_above() -> None:
    for acceptance in (0.0, 0.4, 0.7, 0.95):
        by_rtt = [tpot_never_waiting(costs_of(EMBEDDED, rtt), acceptance, 5) for rtt in range(0, 2000, 25)]
        assert all(near <= far * (1 + 1e-9) for near, far in itertools.pairwise(by_rtt))
        assert by_rtt[-1] <= costs_of(EMBEDDED, 0).step(1) * (1 + 1e-9)
    sure = costs_of(EMBEDDED, 100)
    assert tpot_never_waiting(sure, 1.0, 5) == pytest.approx(sure.step(6) / 6)
    assert tpot_never_waiting(sure, 0.5, 0) == sure.step(1)


def test_the_steps_that_pass_before_a_draft_is_there_are_counted_whole_and_are_at_least_one() -> None:
    assert steps_late(costs_of(EMBEDDED, 0), 4) == 1
    assert steps_late(costs_of(EMBEDDED, 20), 4) == 3
    assert steps_late(costs_of((10.0, 1.0, 0.0), 26), 4) == 3
    assert [plain_steps(0.5, late) for late in (1, 2, 3)] == [2.0, 6.0, 14.0]  # tosses until so many heads in a row
    assert plain_steps(1.0, 3) == 3.0
    assert plain_steps(0.0, 1) == float("inf")


@pytest.mark.parametrize("rate", [0.02, 0.3, 0.5, 0.7, 0.9, 0.95])
def test_ever_later_drafts_wait_ever_more_steps_until_that_is_endless(rate: float) -> None:
    """A round trip that took seconds, beside steps of microseconds, reaches the chances next to 0."""
    steps = list(itertools.takewhile(math.isfinite, (plain_steps(rate, late) for late in itertools.count(1))))
    assert steps == sorted(steps) and steps[-1] > 1e300
    assert all(math.isinf(plain_steps(rate, len(steps) + more)) for more in range(1, 2000))


def test_a_draft_that_is_never_right_costs_plain_decodings_time_and_no_more() -> None:
    wrong, costs = [[99] * 60], costs_of(EMBEDDED, 50)
    plain = costs.step(1)
    assert tpot_never_waiting(costs, 0.0, 8) == pytest.approx(plain)
    assert simulate_never_waiting(wrong, costs, 8, 7) <= 1.02 * plain


def test_copies_in_steps_without_a_draft_never_slow_a_run_down_and_bound_it_far_away() -> None:
    def costs(rtt: float, copies: Undrafted | None) -> RunCosts:
        return RunCosts(0.002, lambda tokens: 0.025 + 0.0002 * tokens, rtt, copies)

    copying = Undrafted(0.0256, 1.5)
    plainly = [tpot_never_waiting(costs(rtt, None), 0.6, 2) for rtt in (0.0, 0.05, 5.0)]
    beside = [tpot_never_waiting(costs(rtt, copying), 0.6, 2) for rtt in (0.0, 0.05, 5.0)]
    assert all(fast < slow for fast, slow in zip(beside, plainly, strict=True))
    assert beside == sorted(beside) and beside[-1] == pytest.approx(0.0256 / 1.5)
    as_plain = tpot_never_waiting(costs(0.05, Undrafted(0.0252, 1.0)), 0.6, 2)  # but for parts of steps that pass
    assert tpot_never_waiting(costs(0.05 - 0.0252, None), 0.6, 2) < as_plain < plainly[1]


def test_of_steps_that_copy_a_part_may_pass_while_a_draft_comes_and_at_least_one_does() -> None:
    def late(rtt: float, copies: Undrafted | None) -> float:
        return steps_late(RunCosts(0.001, lambda tokens: 0.020, rtt, copies), 5)

    copying = Undrafted(0.020, 1.5)
    assert [late(rtt, None) for rtt in (0.0, 0.014, 0.016, 0.055)] == [1, 1, 2, 3]
    assert [late(rtt, copying) for rtt in (0.0, 0.014, 0.016, 0.055)] == pytest.approx([1, 1, 1.05, 3])
