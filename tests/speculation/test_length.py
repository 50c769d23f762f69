"""Lengths that adapt, beside the best fixed one, in simulated sessions whose acceptance and costs are known."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.speculation.estimate import Estimate
from tandem.speculation.length import AdaptiveLength, FixedLength
from tandem.speculation.types import Draft, Proposer, Verdict
from tests.daily import daily
from tests.speculation.simulated_rounds import Session, World, constant, phases, quiet, total

MOST, SESSIONS, TOKENS = 5, 4, 400

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


def informed(world: World) -> Estimate:
    """What a process knows that served such a machine, and middling texts."""
    estimate = Estimate()
    for seed in range(3):
        middling = replace(world, acceptance=constant(0.55))
        Session(middling, AdaptiveLength(MOST, estimate), 1000 + seed).run(200)
    return estimate


def seconds_of(world: World, tokens: int = TOKENS) -> tuple[float, dict[int, float]]:
    """Adaptive, and every fixed length."""
    estimate = informed(world)
    adaptive = total([world] * SESSIONS, lambda: AdaptiveLength(MOST, estimate), tokens)
    fixed = {k: total([world] * SESSIONS, lambda k=k: FixedLength(k), tokens) for k in range(MOST + 1)}
    return adaptive, fixed


@pytest.mark.thorough
@pytest.mark.parametrize("rate", [0.0, 0.2, 0.4, 0.55, 0.7, 0.8, 0.9, 0.95])
@pytest.mark.parametrize("place", PLACES)
def test_within_5_percent_of_the_best_fixed_length_and_3_of_plain_decoding(place: str, rate: float) -> None:
    adaptive, fixed = seconds_of(World(constant(rate), **PLACES[place]))  # type: ignore[arg-type]
    crowded = PLACES[place].get("rows", 1) > 1  # a row is careful of others, which here gain as much as it does
    assert adaptive <= (1.2 if crowded else 1.05) * min(fixed.values())
    assert adaptive <= 1.03 * fixed[0]


@pytest.mark.parametrize("place", daily(PLACES, 0, 4))
def test_a_session_that_turns_from_code_to_prose_and_back_is_followed(place: str) -> None:
    turning = phases((100, 0.9), (100, 0.3))
    adaptive, fixed = seconds_of(World(turning, **PLACES[place]))  # type: ignore[arg-type]
    assert adaptive <= 1.05 * min(fixed.values())


def test_a_process_that_knows_nothing_learns_within_its_first_session() -> None:
    for rate in (0.0, 0.5, 0.9):
        world = World(constant(rate), **FUSED)  # type: ignore[arg-type]
        adaptive = total([world], lambda: AdaptiveLength(MOST, Estimate()), TOKENS)
        fixed = [total([world], lambda k=k: FixedLength(k), TOKENS) for k in range(MOST + 1)]
        assert adaptive <= 1.08 * min(fixed)


def test_drafting_ends_where_it_does_not_pay_and_trials_grow_rare() -> None:
    world = World(constant(0.0), **FUSED)  # type: ignore[arg-type]
    session = Session(world, AdaptiveLength(MOST, informed(world)))
    seconds = session.run(600)
    assert seconds <= 1.025 * total([world], lambda: FixedLength(0), 600)
    assert any(session.lengths[300:])  # it does not give up for good


@pytest.mark.parametrize("place", [place for place in PLACES if place.startswith("fused")])
def test_a_draft_that_ends_where_it_is_unsure_gains_over_every_fixed_length(place: str) -> None:
    def sure_of_two_thirds(position: int, accepted: int) -> float:
        return 0.95 if random.Random(position).random() < 0.67 else 0.1

    adaptive, fixed = seconds_of(World(sure_of_two_thirds, doubts=True, **PLACES[place]))  # type: ignore[arg-type]
    assert adaptive <= 0.95 * min(fixed.values())


def test_rows_that_share_a_step_make_drafts_shorter_and_only_while_they_share_it() -> None:
    def usual(world: World, known: Estimate, tokens: int) -> float:
        session = Session(world, AdaptiveLength(MOST, known))
        session.run(tokens)
        return sum(session.lengths) / len(session.lengths)

    crowd = quiet(World(constant(0.7), verify=0.009, position=0.0012, draft=0.0005, rows=8))
    alone, known = replace(crowd, rows=1), informed(crowd)
    expected = usual(alone, informed(alone), 200)
    assert usual(crowd, known, 400) < expected - 0.5
    assert usual(alone, known, 200) > expected - 1


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
        policy = AdaptiveLength(most, Estimate())
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
