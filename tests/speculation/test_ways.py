"""The choice between rounds that wait and a target that never waits, and changing from one to the other."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

import pytest

from tandem.runners.toy import ToyConfig
from tandem.speculation.depth import Pipeline
from tandem.speculation.lookahead import LookaheadPolicy, RunMeasurements
from tandem.speculation.mode_ratios import PRIOR_RUNNING, ModeRatio
from tandem.speculation.never_waiting_theory import running_costs
from tandem.speculation.step_times import Times
from tandem.speculation.types import Draft, Verdict
from tandem.speculation.verification_mode import (
    RECONSIDERED,
    ChosenRounds,
    ModeChoice,
    expectation,
    waiting_costs,
)
from tests.speculation.run_simulated import measurements
from tests.support import GREEDY, SAMPLED, answer, distributed, ids, oracle, run, target_site, toy

STEP = 0.009


class KnownAcceptance(LookaheadPolicy):
    """A reach whose request accepts drafts with a known probability."""

    def __init__(self, acceptance: float, measured: RunMeasurements, most: int = 5) -> None:
        super().__init__(most, measured)
        self._known = acceptance

    @property
    def acceptance(self) -> float:
        return self._known


def pays(
    rtt: float,
    acceptance: float = 0.57,
    step: float = STEP,
    draft: float = 0.0003,
    running: bool | None = None,
    known: RunMeasurements | None = None,
) -> bool:
    known = known or measurements(Times(draft, step, rtt))
    return ModeChoice(KnownAcceptance(acceptance, known), 8).runs(running)


def test_waiting_is_chosen_near_the_target_and_never_waiting_far_from_it() -> None:
    assert [pays(rtt) for rtt in (0.0, 0.002, 0.02, 0.05, 0.2)] == [False, False, True, True, True]
    assert [pays(rtt, step=0.055, draft=0.0006) for rtt in (0.0, 0.02, 0.05, 0.1)] == [False, False, True, True]


def test_the_choice_is_within_five_percent_of_the_best_by_the_costs_that_it_knows() -> None:
    for rtt, acceptance in itertools.product((0.0, 0.01, 0.03, 0.1), (0.2, 0.5, 0.8, 0.95)):
        times, table = Times(0.0003, STEP, rtt), (STEP,) * 6
        waiting = min(cost.seconds for cost in waiting_costs(times, acceptance, table, 8))
        running = PRIOR_RUNNING * min(cost.seconds for cost in running_costs(times, acceptance, table))
        chosen = running if pays(rtt, acceptance) else waiting
        assert chosen <= 1.05 * min(waiting, running), (rtt, acceptance)


def test_before_anything_is_measured_the_opening_decides_and_plain_decoding_never_waits() -> None:
    unknown = RunMeasurements()
    choice = ModeChoice(LookaheadPolicy(5, unknown), 8)
    assert not choice.runs(None, 0.0005)
    assert choice.runs(None, 0.02)
    assert ModeChoice(LookaheadPolicy(0, unknown), 8).runs(None, 0.0)


def test_a_way_is_changed_only_for_a_clear_gain() -> None:
    better = next(rtt / 10000 for rtt in range(2000) if pays(rtt / 10000))
    assert pays(better, running=True) and not pays(better, running=False)
    worse = better - 0.001
    assert not pays(worse) and pays(worse, running=True)
    assert not pays(0.0, running=True) and pays(0.1, running=False)


def test_a_way_that_takes_longer_than_its_formula_says_is_left_and_tried_again_later() -> None:
    known = measurements(Times(0.0003, STEP, 0.0))
    choice = ModeChoice(KnownAcceptance(0.57, known), 8)
    expected = expectation(known, 0.57, 5, 8)
    assert expected is not None and not choice.runs(None)
    for _ in range(10):
        choice.took(False, 30, 30 * 2 * expected.waiting)
    assert known.waiting.value == pytest.approx(1.85, abs=0.1) and known.running.value == PRIOR_RUNNING
    assert choice.runs(None) and choice.runs(False)
    for _ in range(100):
        choice.took(True, 30, 30 * 1.33 * expected.running)
    assert known.running.value == pytest.approx(1.3, abs=0.02)
    assert known.waiting.value == pytest.approx(1.0, abs=0.02)
    assert not choice.runs(None)


class Timed:
    """A way whose rounds take a second for each of their two tokens, and another second in the first round."""

    def __init__(self) -> None:
        self.now, self.rounds = 0.0, 0

    async def open(self, prompt: Sequence[int]) -> None:
        pass

    async def round(self, tokens: Sequence[int], k: int, model_k: int | None = None) -> tuple[Draft, Verdict]:
        self.now += 2.0 if self.rounds else 3.0
        self.rounds += 1
        return Draft((7,)), Verdict((7, 8), 1)

    async def resume(self, prompt: Sequence[int]) -> None:
        pass

    async def suspend(self, tokens: Sequence[int]) -> None:
        pass

    async def close(self) -> None:
        pass


def test_rounds_of_a_way_are_timed_but_for_the_first_and_reported_at_each_choice_and_at_the_end() -> None:
    way, told = Timed(), []
    rounds = ChosenRounds(
        way.open,
        lambda now: True,
        lambda *report: told.append(report),
        Timed(),
        way,
        LookaheadPolicy(5, RunMeasurements()),
        clock=lambda: way.now,
    )

    async def test(count: int) -> None:
        await rounds.open([1])
        for _ in range(count):
            await rounds.round([1], 3)
        await rounds.close()

    run(test(RECONSIDERED + 8))
    assert told == [(True, 2 * (RECONSIDERED - 2), 2.0 * (RECONSIDERED - 2)), (True, 2 * 8, 2.0 * 8)]
    way.rounds, told[:] = 0, []
    run(test(4))
    assert told == []  # too few tokens to tell


def test_nothing_is_held_against_a_formula_that_knows_no_costs() -> None:
    unknown = RunMeasurements()
    ModeChoice(LookaheadPolicy(5, unknown), 8).took(True, 30, 1.0)
    assert (unknown.waiting, unknown.running) == (ModeRatio(), ModeRatio(PRIOR_RUNNING))


@pytest.mark.parametrize(
    ("fixed", "each", "rtt", "acceptance"), [(0.009, 0.0006, 0.008, 0.6), (0.02, 0.002, 0.02, 0.8)]
)
def test_under_load_steps_are_charged_with_what_they_cost_the_neighbours(
    fixed: float, each: float, rtt: float, acceptance: float
) -> None:
    """Alone, the target had better not wait; beside seven others, its extra steps cost more than they bring."""

    def among(rows: int) -> RunMeasurements:
        known = RunMeasurements()
        for tokens in range(1, 60):
            known.steps.note(1, tokens, fixed + each * tokens)
        known.times.drafted(1, 0.0003)
        for _ in range(60):
            known.times.verified(fixed + each * (rows + 1), rtt)
            known.shared(rows - 1, rows)
        return known

    assert [pays(0.0, acceptance, known=among(rows)) for rows in (1, 8)] == [True, False]


def test_a_request_that_changes_its_way_again_and_again_says_what_the_target_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Over the wire, and every few rounds."""
    turns = itertools.count()
    monkeypatch.setattr("tandem.speculation.verification_mode.RECONSIDERED", 3)
    monkeypatch.setattr(ModeChoice, "runs", lambda *known: next(turns) % 2 == 0)

    async def test() -> None:
        async with target_site(toy(ToyConfig(step_seconds=0.002))) as site:
            tasks = len(asyncio.all_tasks())
            async with distributed(site.address, "miss=0.2", pipeline=Pipeline.AUTO) as (generator, _):
                for sampling in (GREEDY, SAMPLED):
                    request = ids(b"abcabc", 90, sampling=sampling, ignore_end_of_sequence=True)
                    got = await answer(generator.generate, request)
                    assert got.token_ids == oracle(b"abcabc", sampling, 90, past_the_end=True)
                    stats = got.completion.stats
                    assert 0 < stats.run_steps < stats.rounds
            assert next(turns) > 10
            assert site.free == 4
            assert len(asyncio.all_tasks()) <= tasks + 1

    run(test())
