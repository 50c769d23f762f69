"""The estimate of acceptance and times, and the choice by it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.speculation.estimate import LEAST_GAIN, AcceptanceRates, Estimate, Line, best_length, expected_by_length
from tandem.speculation.types import Draft, Proposer, Verdict


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_acceptance_comes_to_be_what_was_seen_also_at_positions_that_were_hardly_tried(rate: float) -> None:
    chance, known = random.Random(1), AcceptanceRates(0.7, 0.998)
    for _ in range(400):
        accepted = next((i for i in range(3) if chance.random() >= rate), 3)
        known.note(3, accepted)
    assert known.rates(3)[0] == pytest.approx(rate, abs=0.06)
    assert known.rates(6)[5] == pytest.approx(rate, abs=0.12)


def test_a_request_begins_with_what_its_process_knows_and_a_changed_text_is_followed() -> None:
    process = AcceptanceRates(0.7, 0.998)
    for _ in range(300):
        process.note(2, 0)
    request = AcceptanceRates(process, 0.96)
    before = request.rates(1)[0]
    assert max(before, process.rates(1)[0]) < 0.1
    for _ in range(40):
        request.note(2, 2)
    assert request.rates(1)[0] > 0.6


def test_a_line_finds_what_steps_take_by_their_size_and_one_late_step_changes_little() -> None:
    line = Line(0.1)
    for size in (1, 4, 2, 6, 8) * 20:
        line.note(size, 0.010 + 0.001 * size)
    before = line.at(4)
    assert before == pytest.approx(0.014, rel=0.05)
    line.note(4, 10.0)
    assert line.at(4) == pytest.approx(before, rel=0.03)


def test_before_sizes_differ_a_share_of_the_time_is_taken_to_grow() -> None:
    line = Line(0.1)
    assert not line.known
    for _ in range(10):
        line.note(1, 0.010)
    assert line.at(1) == pytest.approx(0.010)
    assert line.at(2) == pytest.approx(0.011)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.floats(0.001, 1), st.floats(0, 1), st.floats(0, 8))
def test_the_length_is_that_of_most_tokens_per_second_of_all_rows(
    rates: list[float], fixed: float, each: float, company: float
) -> None:
    tokens = expected_by_length(rates)
    seconds = [fixed + each * n for n in range(len(tokens))]
    speeds = [(t + company) / s for t, s in zip(tokens, seconds, strict=True)]
    chosen = best_length(tokens, seconds, company)
    assert speeds[chosen] == max(speeds) if chosen else max(speeds) <= LEAST_GAIN * speeds[0]


def test_a_step_shared_with_others_counts_whole_and_tells_how_many_share() -> None:
    known = Estimate()
    for n in (0, 1, 2, 3) * 50:
        tokens = 14 + n + 1  # seven others of two tokens each
        draft = Draft((0,) * n, 0.0, 0.0, (Proposer.MODEL,) * n)
        known.observe(draft, Verdict((0,), 0, 0.0, 0.010 + 0.0005 * tokens, rows=8, step_tokens=tokens), 0.020)
    assert known.rows == pytest.approx(7) and known.others == pytest.approx(14)
    assert known.steps(2) == pytest.approx([0.0175, 0.018, 0.0185], rel=0.01)
