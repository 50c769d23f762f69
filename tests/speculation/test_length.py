"""Lengths that adapt, beside the best fixed one, in simulated sessions whose acceptance and costs are known."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.speculation.acceptance_rates import AcceptanceCounts
from tandem.speculation.length import (
    LEAST_GAIN,
    AdaptiveLength,
    FixedLength,
    LengthPlan,
    RoundCosts,
    best_plan,
    expected_by_length,
)
from tandem.speculation.round_statistics import RoundStatistics, tokens_of_step
from tandem.speculation.types import Draft, Proposer, Verdict
from tests.daily import daily
from tests.speculation.simulated_rounds import Session, World, constant, phases, quiet, total

MOST = 5
SESSIONS, TOKENS = 4, 400

FUSED = {"verify": 0.030, "position": 0.0008, "draft": 0.004}
FAST = {"verify": 0.009, "position": 0.0002, "draft": 0.0005, "each_round": 0.0003}
PLACES: dict[str, dict[str, float]] = {
    "fused": FUSED,
    "fused, fast kernels": FAST,
    "fused, a draft of a third of the target": {**FUSED, "draft": 0.010},
    "distributed, RTT 20 ms": {**FAST, "each_round": 0.021},
    "distributed, RTT 100 ms": {**FAST, "each_round": 0.101},
    "remote draft, RTT 5 ms": {**FUSED, "asking": 0.005},
    "remote draft, RTT 20 ms": {**FUSED, "asking": 0.020},
    "eight rows a step": {"verify": 0.030, "position": 0.0015, "draft": 0.008, "rows": 8},
}


def informed(world: World) -> RoundStatistics:
    """What a process knows that served such a machine, and middling texts."""
    statistics = RoundStatistics()
    for seed in range(3):
        middling = replace(world, acceptance=constant(0.55))
        Session(middling, AdaptiveLength(MOST, statistics), 1000 + seed).run(200)
    return statistics


def seconds_of(world: World, tokens: int = TOKENS) -> tuple[float, dict[int, float]]:
    """Adaptive, and every fixed length."""
    statistics = informed(world)
    adaptive = total([world] * SESSIONS, lambda: AdaptiveLength(MOST, statistics), tokens)
    fixed = {k: total([world] * SESSIONS, lambda k=k: FixedLength(k), tokens) for k in range(MOST + 1)}
    return adaptive, fixed


@pytest.mark.thorough
@pytest.mark.parametrize("rate", [0.0, 0.2, 0.4, 0.55, 0.7, 0.8, 0.9, 0.95])
@pytest.mark.parametrize("place", PLACES)
def test_within_5_percent_of_the_best_fixed_length_and_3_of_plain_decoding(place: str, rate: float) -> None:
    adaptive, fixed = seconds_of(World(constant(rate), **PLACES[place]))  # type: ignore[arg-type]
    assert adaptive <= 1.05 * min(fixed.values())
    assert adaptive <= 1.03 * fixed[0]


@pytest.mark.parametrize("place", daily(PLACES, 0, 4))
def test_a_session_that_turns_from_code_to_prose_and_back_is_followed(place: str) -> None:
    turning = phases((100, 0.9), (100, 0.3))
    adaptive, fixed = seconds_of(World(turning, **PLACES[place]))  # type: ignore[arg-type]
    assert adaptive <= 1.05 * min(fixed.values())


def test_where_copies_are_good_and_the_model_is_not_each_gets_a_length_of_its_own() -> None:
    world = World(constant(0.25), **{**FUSED, "draft": 0.010}, copies=0.3, copy_rate=0.95)  # type: ignore[arg-type]
    adaptive, fixed = seconds_of(world)
    assert adaptive < 0.97 * min(fixed.values())


def test_a_process_that_knows_nothing_learns_within_its_first_session() -> None:
    for rate in (0.0, 0.5, 0.9):
        world = World(constant(rate), **FUSED)  # type: ignore[arg-type]
        adaptive = total([world], lambda: AdaptiveLength(MOST, RoundStatistics()), TOKENS)
        fixed = [total([world], lambda k=k: FixedLength(k), TOKENS) for k in range(MOST + 1)]
        assert adaptive <= 1.08 * min(fixed)


def test_drafting_ends_where_it_does_not_pay_and_trials_grow_rare() -> None:
    world = World(constant(0.0), **FUSED)  # type: ignore[arg-type]
    session = Session(world, AdaptiveLength(MOST, informed(world)))
    seconds = session.run(600)
    assert seconds <= 1.025 * total([world], lambda: FixedLength(0), 600)
    assert any(session.lengths[300:])  # it does not give up for good


def test_a_plain_step_that_was_measured_long_by_accident_is_measured_again() -> None:
    world = World(constant(0.0), **FUSED)  # type: ignore[arg-type]
    statistics = informed(world)
    for _ in range(25):
        statistics.verify.note(1, 1, 0.1)
    session = Session(world, AdaptiveLength(MOST, statistics))
    session.run(2000)
    assert sum(length == 0 for length in session.lengths[-200:]) > 150


def test_one_slow_step_changes_no_decision() -> None:
    world = quiet(World(constant(0.7), **FUSED))  # type: ignore[arg-type]
    statistics = informed(world)
    before = statistics.verify.table(1, MOST + 1)
    for _ in range(2):
        statistics.verify.note(1, 4, 10.0)
    for _ in range(4):
        statistics.verify.note(1, 4, before[4])
    assert statistics.verify.table(1, MOST + 1) == pytest.approx(before, rel=0.02)


def test_rows_that_share_a_step_make_drafts_shorter() -> None:
    def usual(rows: int) -> float:
        world = quiet(World(constant(0.7), verify=0.009, position=0.0012, draft=0.0005, rows=rows))
        session = Session(world, AdaptiveLength(MOST, informed(world)))
        session.run(400)
        return sum(session.lengths) / len(session.lengths)

    assert usual(8) < usual(1) - 0.5


def test_the_best_plan_is_the_best_of_all_pairs_of_lengths() -> None:
    verify, draft = (0.028, 0.03, 0.031, 0.032, 0.033, 0.034, 0.035), (0, 0.004, 0.008, 0.012, 0.016, 0.02)
    for copied in (0.0, 0.3, 1.0):
        costs = RoundCosts(verify, draft, 0.001, 0.002, copied, 0.1)
        for a in (0.1, 0.5, 0.9):
            copies, models = expected_by_length([0.9] * MOST), expected_by_length([a] * MOST)
            found = best_plan(copies, models, costs)
            one = costs.verify[1]

            def rate(c: int, m: int, copies=copies, models=models, costs=costs, one=one) -> float:  # type: ignore[no-untyped-def]
                if not c and not m:
                    return 1 / costs.plain
                e = costs.empty if m else 0.0
                tokens = costs.copied * copies[c] + (1 - costs.copied) * (e + (1 - e) * models[m])
                drafted = costs.verify[m + 1] + costs.draft[m]
                seconds = costs.copied * costs.verify[c + 1] + (1 - costs.copied) * (e * one + (1 - e) * drafted)
                return tokens / (seconds + costs.drafted)

            best = max(rate(c, m) for c in range(MOST + 1) for m in range(MOST + 1))
            assert found.rate == pytest.approx(best if best > (1 + LEAST_GAIN) / costs.plain else 1 / costs.plain)


@pytest.mark.parametrize(("verify", "k"), [(0.0119, 0), (0.0115, 1)])
def test_drafts_that_gain_hardly_anything_are_not_made(verify: float, k: int) -> None:
    """A draft token that is right one time in five: its step may take 20 % longer, and 3 % of that are left."""
    expected = expected_by_length([0.2])
    costs = RoundCosts((0.01, 0.01, verify), (0.0, 0.0), 0.0, 0.0, 0.0, 0.0)
    assert best_plan(expected, expected, costs).k == k


def test_a_fixed_length_leaves_room_for_the_targets_own_token() -> None:
    assert [FixedLength(3).choose(remaining).k for remaining in (1, 2, 3, 4, 100)] == [0, 1, 2, 3, 3]
    with pytest.raises(ValueError, match="speculation_length: -1"):
        FixedLength(-1)


ROUNDS = st.lists(
    st.tuples(
        st.integers(1, 40),  # remaining
        st.integers(0, 12),  # drafted at most
        st.sampled_from([None, *Proposer]),
        st.floats(0, 1),  # accepted share
        st.floats(0, 100),  # verify
        st.floats(0, 100),  # draft
        st.floats(0, 1000),  # round
        st.integers(1, 64),  # rows
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(most=st.integers(0, 12), rounds=ROUNDS)
def test_whatever_is_observed_lengths_stay_within_their_bounds(most, rounds) -> None:  # type: ignore[no-untyped-def]
    def run() -> list[tuple[int, int | None]]:
        policy = AdaptiveLength(most, RoundStatistics())
        chosen = []
        for remaining, drafted, by, share, verify, draft_seconds, seconds, rows in rounds:
            length = policy.choose(remaining)
            k, model_k = length.k, length.model_k
            assert 0 <= k <= min(most, remaining - 1)
            assert model_k is not None and 0 <= model_k <= k
            chosen.append((k, model_k))
            n = 0 if by is None else min(drafted, k)
            draft = Draft((0,) * n, 0.0, draft_seconds if n else 0.0, (by,) * n, rows=rows)
            accepted = int(share * n)
            verdict = Verdict((0,) * (accepted + 1), accepted, 0.0, verify, rows=rows, width=n + 1)
            policy.observe(k, draft, verdict, seconds)
        return chosen

    assert run() == run()  # the same inputs, the same lengths


def test_the_simulation_accepts_as_often_as_it_was_told() -> None:
    world = quiet(World(constant(0.6), **FUSED))  # type: ignore[arg-type]
    policy = Counting(1)
    Session(world, policy).run(4000)
    assert policy.accepted / policy.drafted == pytest.approx(0.6, abs=0.03)


class Counting:
    """A fixed length that counts."""

    def __init__(self, k: int) -> None:
        self._fixed, self.drafted, self.accepted = FixedLength(k), 0, 0

    def choose(self, remaining: int) -> LengthPlan:
        return self._fixed.choose(remaining)

    def observe(self, asked: int, draft: Draft, verdict: Verdict, seconds: float) -> None:
        self.drafted += len(draft.token_ids)
        self.accepted += verdict.accepted


def crowded(rows: int, others: int) -> RoundStatistics:
    """Of a process whose steps have so many rows, all but one of `others` tokens: 10 ms, and 0.5 for each token."""
    statistics = RoundStatistics()
    for i in range(200):
        n = i % (MOST + 1)
        tokens = (rows - 1) * others + n + 1
        verdict = Verdict(
            (0, 0), 1, 0.0, 0.010 + 0.0005 * tokens, rows=rows, width=max(others, n + 1), step_tokens=tokens
        )
        statistics.note(n, Draft((0,) * n, 0.0, 0.0, (Proposer.MODEL,) * n), verdict, verdict.compute_seconds, True)
    return statistics


@pytest.mark.parametrize(("rate", "alone", "beside_others"), [(0.3, True, False), (0.9, True, True)])
def test_a_row_that_makes_others_wait_drafts_only_what_is_worth_their_while(
    rate: float, alone: bool, beside_others: bool
) -> None:
    """A token drafted costs 0.5 ms: alone that is worth 0.05 tokens, beside seven others that commit two each 0.5."""
    for statistics, drafts in ((crowded(1, 0), alone), (crowded(8, 2), beside_others)):
        statistics.accepted = {proposer: AcceptanceCounts(1.0) for proposer in Proposer}
        for proposer in Proposer:
            for _ in range(400):
                statistics.accepted[proposer].note(MOST, MOST if _ % 10 < 10 * rate else 0)
        policy = AdaptiveLength(MOST, statistics)
        policy._allowance = -1.0  # no trials
        assert (policy.choose(50).k > 0) is drafts


def test_a_step_s_tokens_are_those_of_ragged_rows_or_of_rows_as_wide_as_the_widest() -> None:
    ragged = Verdict((1,), 0, rows=3, width=4, step_tokens=6)
    assert tokens_of_step(ragged, 0) == 6
    assert tokens_of_step(Verdict((1,), 0, rows=3, width=4), 0) == 12
    assert tokens_of_step(Verdict((1,), 0), 2) == 3
