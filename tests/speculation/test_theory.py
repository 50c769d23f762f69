"""The formulas against published tables, simulation, and brute force."""

from __future__ import annotations

import random

import pytest

from tandem.speculation.theory import (
    StepCosts,
    best_length_closed_form,
    break_even_rtt,
    capacity_gain,
    carried_on,
    expected_tokens,
    expected_tokens_measured,
    rate_for,
    tpot_fused,
    tpot_pipelined,
    tpot_stop_and_wait,
)

# arXiv 2606.25091: break-even RTT in ms at g = 5, t_d = 10 ms, by t_ar and acceptance; None: never.
PUBLISHED = {
    100: {0.5: 47, 0.7: 144, 0.85: 265, 0.9: 319},
    50: {0.5: None, 0.7: 47, 0.85: 108, 0.9: 134},
    30: {0.5: None, 0.7: 8, 0.85: 45, 0.9: 61},
    20: {0.5: None, 0.7: None, 0.85: 13, 0.9: 24},
}


@pytest.mark.parametrize("plain_ms", PUBLISHED)
def test_the_published_break_even_table_is_reproduced(plain_ms: int) -> None:
    costs = StepCosts(draft=0.010, plain=plain_ms / 1000, verify_fixed=plain_ms / 1000)
    for acceptance, expected in PUBLISHED[plain_ms].items():
        found = 1000 * break_even_rtt(costs, [acceptance] * 5)
        assert found <= 0 if expected is None else round(found) == expected


def test_expected_tokens_agree_with_simulation_and_with_measured_rates() -> None:
    rng = random.Random(1)
    for a, g in ((0.0, 4), (0.5, 1), (0.8, 5), (0.95, 9), (1.0, 3)):
        assert expected_tokens_measured([a] * g) == pytest.approx(expected_tokens(a, g))
        rounds = [next((i for i in range(g) if rng.random() >= a), g) + 1 for _ in range(40_000)]
        assert sum(rounds) / len(rounds) == pytest.approx(expected_tokens(a, g), rel=0.02)
    assert expected_tokens_measured([0.6, 0.5]) == pytest.approx(1 + 0.6 + 0.3)


@pytest.mark.parametrize("acceptance", [0.5, 0.7, 0.8, 0.9])
@pytest.mark.parametrize("cost", [0.03, 0.1, 0.25])
@pytest.mark.parametrize("rtt", [0.0, 0.5, 2.0, 6.0])
def test_the_closed_form_is_next_to_the_integer_optimum(acceptance: float, cost: float, rtt: float) -> None:
    costs = StepCosts(draft=cost, plain=1.0, verify_fixed=1.0)
    continuous = best_length_closed_form(acceptance, cost, rtt)

    def tpot(g: int) -> float:
        return tpot_stop_and_wait(costs, [acceptance] * g, rtt)

    integer = min(range(1, 65), key=tpot)
    assert abs(continuous - integer) < 1 or continuous < 1 == integer


def test_the_closed_form_gives_the_known_values() -> None:
    known = {0.0: 5.8, 2.0: 9.2, 6.0: 12.3}
    assert {r: round(best_length_closed_form(0.8, 0.1, r), 1) for r in known} == known


def test_the_examples_of_four_architectures() -> None:
    """a = .8, t_d = 5, t_v = 40, RTT = 60 ms: streaming 25.0, best stop-and-wait 32.3, plain 40, fused 17.6."""
    costs = StepCosts(draft=5, plain=40, verify_fixed=40)
    assert tpot_pipelined(costs, 0.8, 60) == pytest.approx(25.0)
    assert min(tpot_stop_and_wait(costs, [0.8] * g, 60) for g in range(1, 30)) == pytest.approx(32.3, abs=0.05)
    assert min(tpot_fused(costs, [0.8] * g) for g in range(1, 30)) == pytest.approx(17.6, abs=0.05)


def test_the_pipelined_bound_agrees_with_a_simulation() -> None:
    rng = random.Random(2)
    costs, a, rtt = StepCosts(draft=5, plain=40, verify_fixed=40), 0.8, 60.0
    time = tokens = 0.0
    for _ in range(20_000):  # a run of drafts up to the first miss, whose verdict is then waited for
        run = 1
        while rng.random() < a:
            run += 1
        time += run * costs.draft + rtt + costs.verify(0)
        tokens += run
    assert time / tokens == pytest.approx(tpot_pipelined(costs, a, rtt), rel=0.02)


def test_distributed_costs_one_round_trip_per_round_more_than_fused() -> None:
    costs = StepCosts(draft=2, plain=30, verify_fixed=30, verify_slope=0.5)
    rates = [0.7, 0.6, 0.5]
    more = tpot_stop_and_wait(costs, rates, rtt=20, transfer=1) - tpot_fused(costs, rates)
    assert more == pytest.approx(21 / expected_tokens_measured(rates))
    assert capacity_gain(costs, 3) == pytest.approx(1 + 3 * 2 / 32)


def test_one_rate_stands_for_many_and_rates_are_carried_on() -> None:
    assert rate_for(expected_tokens(0.7, 4), 4) == pytest.approx(0.7)
    assert rate_for(1.0, 3) == pytest.approx(0.0, abs=1e-12)
    assert rate_for(4.0, 3) == pytest.approx(1.0)
    assert carried_on([0.8, 0.6], 4) == [0.8, 0.6, 0.6, 0.6]
    assert carried_on([0.8, 0.6], 1) == [0.8]
    assert carried_on([], 3) == []


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: expected_tokens(1.2, 3), "acceptance: 1.2"),
        (lambda: expected_tokens_measured([0.5, -0.1]), "acceptance: -0.1"),
        (lambda: best_length_closed_form(1.0, 0.1), "acceptance: 1.0"),
        (lambda: best_length_closed_form(0.5, 0.0), "cost ratio: 0.0"),
        (lambda: StepCosts(1, 0, -1), "step costs"),
        (lambda: StepCosts(1, float("nan"), 1), "step costs"),
        (lambda: capacity_gain(StepCosts(1, 0, 0), 3), "step costs: a verification"),
        (lambda: tpot_pipelined(StepCosts(1, 1, 1), 0.5, -1), "rtt: -1"),
    ],
)
def test_impossible_values_are_refused_by_name(call, named: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=named):
        call()
