"""The loop at a target that never waits, in virtual time: tokens, limits, what is counted, and the time it takes."""

from __future__ import annotations

import asyncio
import itertools
import statistics

import pytest

from tandem.speculation.estimate import Estimate
from tandem.speculation.types import Verdict
from tandem.speculation.verification_mode import (
    MOST_AHEAD,
    REFRESH,
    RESTING,
    Depth,
    LookaheadPolicy,
    Pipeline,
    never_waits,
)
from tests.daily import daily
from tests.speculation.run_simulated import PROMPT, Ran, RunningTarget, SimulatedDraft, generate, measurements, said
from tests.speculation.virtual_time import in_virtual_time


def run(
    acceptance: float = 0.7,
    count: int = 80,
    draft_s: float = 0.0003,
    draft: SimulatedDraft | None = None,
    width: int = 6,
    fixed: int | None = None,
    pause: float = 0.0,
    stop: frozenset[int] = frozenset(),
    known: Estimate | None = None,
    **target: object,
) -> Ran:
    return in_virtual_time(
        generate(
            RunningTarget(**target),
            draft or SimulatedDraft(acceptance, draft_s),
            count,
            width,
            fixed,
            known,
            pause,
            stop,
        )
    )


@pytest.mark.parametrize("acceptance", daily([0.0, 0.6, 0.95, 1.0], 1, 3))
def test_the_tokens_are_the_targets_whatever_delays_drafts_and_breaks_do(acceptance: float) -> None:
    """`jitter` lets messages overtake one another by more than a step."""
    for rtt, jitter, verify in ((0.0, 0.0, 0.0), (0.03, 0.04, 0.009), (0.001, 0.2, 0.03)):
        for breaks in (frozenset(), frozenset({1, 2, 5, 40, 41})):
            for fixed in (None, 0, 3):
                found = run(acceptance, rtt=rtt, jitter=jitter, verify_seconds=verify, breaks=breaks, fixed=fixed)
                assert found.tokens == said(80)
                assert found.target.furthest <= len(PROMPT) + 80
                assert found.target.closed
                assert fixed != 0 or found.target.drafted_steps == 0
                assert (found.target.resumed > 0) == bool(breaks)


def test_drafts_that_come_late_or_are_nonsense_cost_no_time_beside_plain_decoding() -> None:
    for acceptance, rtt in itertools.product((0.0, 0.3, 0.6, 0.9), (0.0, 0.02, 0.1, 0.5)):
        plain = 80 * 0.009 + rtt
        found = run(acceptance, rtt=rtt)
        assert found.seconds <= plain * (1 + 1e-9), (acceptance, rtt)


def test_a_caller_who_reads_slowly_stops_the_target_and_gets_every_token() -> None:
    found = run(count=150, rtt=0.02, pause=1.0, window=24)
    assert found.tokens == said(150)
    assert found.target.most_unread <= 24
    assert found.most_unused <= 24 + 7  # the next step is asked for beforehand
    assert run(count=150, rtt=0.02, window=24).tpot < found.tpot / 5


def test_a_stop_ends_the_output_at_the_stop_and_the_run_soon_after() -> None:
    text = said(60)
    stop = text[30]
    end = text.index(stop) + 1
    found = run(count=60, rtt=0.05, stop=frozenset({stop}))
    assert found.tokens == text[:end]
    assert found.target.closed
    assert found.target.furthest < len(PROMPT) + 60


def test_what_was_drafted_is_verified_or_counted_as_stale() -> None:
    for acceptance, rtt in ((0.6, 0.0), (0.8, 0.05), (0.95, 0.05)):
        found = run(acceptance, rtt=rtt)
        stats = found.stats
        assert stats.drafted + stats.stale_drafts == found.draft.tokens
        assert stats.rounds + stats.accepted >= 80
        assert 0 < stats.accepted <= stats.drafted
        assert sum(stats.drafted_by.values()) == stats.drafted
        assert stats.network_seconds <= found.seconds


def test_drafts_that_slow_the_targets_steps_rest_unless_they_gain_more_than_that() -> None:
    def seconds(acceptance: float, slowed: float, each: float = 0.003) -> list[float]:
        known = Estimate()
        drafts = [SimulatedDraft(acceptance, each) for _ in range(40)]
        return [
            run(draft=draft, beside=draft, slowed=slowed, known=known, row_seconds=0.002).seconds for draft in drafts
        ]

    plain = 80 * 0.009
    rarely = seconds(0.5, 2.0)
    assert statistics.median(rarely) <= 1.001 * plain and statistics.mean(rarely) <= 1.025 * plain
    assert statistics.median(seconds(0.9, 2.0, 0.001)) <= 0.9 * plain
    assert statistics.median(seconds(0.7, 1.0)) <= 0.9 * plain  # drafting takes longer than a step


def test_a_copied_step_that_drafting_slowed_counts_as_a_cost_of_drafting() -> None:
    def rests(seconds: float) -> bool:
        lookahead = LookaheadPolicy(6, measurements(0.0003, 0.009, 0.0))
        lookahead.estimate.trial = 1.0  # nothing is tried
        for _ in range(REFRESH + 1):
            for _ in range(100):
                lookahead.observe(True)
            lookahead.stepped(3, Verdict((1, 2, 3, 4), 3, compute_seconds=seconds), 0.0, copied=True)
        return lookahead.plan == RESTING

    assert rests(0.02) and not rests(0.008)


def test_a_drafter_that_has_nothing_or_breaks_leaves_plain_decoding_or_ends_the_request() -> None:
    dry = run(draft=SimulatedDraft(0.7, 0.0003, dry=True), rtt=0.02)
    assert dry.tokens == said(80)
    assert dry.seconds <= 80 * 0.009 + 0.02 + 1e-9
    with pytest.raises(ValueError, match="the draft model broke"):
        run(draft=SimulatedDraft(0.7, 0.0003, fails_at=0), rtt=0.02)


def test_a_target_that_is_lost_again_and_again_ends_the_request_with_the_cause() -> None:
    with pytest.raises(ConnectionError, match="refused"):
        run(refuses=True)


def test_nothing_is_left_behind_by_a_request_that_is_abandoned() -> None:
    async def test() -> None:
        target, before = RunningTarget(rtt=0.05), len(asyncio.all_tasks())
        task = asyncio.create_task(generate(target, SimulatedDraft(0.7, 0.0003), 80))
        await asyncio.sleep(0.3)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(1.0)
        assert target.closed
        assert len(asyncio.all_tasks()) == before

    in_virtual_time(test())


def test_the_reach_grows_with_the_round_trip_and_acceptance_and_is_bounded() -> None:
    def plan(rtt: float, acceptance: float, width: int = 6) -> tuple[int, int, int]:
        lookahead = LookaheadPolicy(width, measurements(0.0003, 0.009, rtt))
        for i in range(1000):
            lookahead.observe((i * 0.6180339887) % 1 < acceptance)
        lookahead.estimate.trial = 1.0  # nothing is tried
        return lookahead.plan

    near, far, sure = plan(0.0, 0.85), plan(0.1, 0.85), plan(0.1, 0.97)
    assert near.depth < far.depth < sure.depth <= MOST_AHEAD
    assert near.fresh <= near.depth and far.fresh <= far.depth
    assert plan(0.0, 0.02) == plan(0.1, 0.5) == RESTING  # what is right comes too late
    assert plan(0.0, 0.97).width == 6
    assert plan(0.1, 0.9, width=0) == (0, 0, 0)


def test_waiting_is_chosen_near_the_target_and_never_waiting_far_from_it() -> None:
    def chosen(rtt: float, step: float) -> bool:
        return never_waits(Pipeline.AUTO, 5, measurements(0.0003, step, rtt))

    assert [chosen(rtt, 0.009) for rtt in (0.0, 0.002, 0.02, 0.2)] == [False, False, True, True]
    assert [chosen(rtt, 0.055) for rtt in (0.0, 0.01, 0.02, 0.1)] == [False, False, True, True]


def test_before_anything_is_measured_the_opening_decides_and_plain_decoding_never_waits() -> None:
    unknown = Estimate()
    assert [never_waits(Pipeline.AUTO, 5, unknown, rtt) for rtt in (0.0005, 0.02)] == [False, True]
    assert never_waits(Pipeline.AUTO, 0, unknown)
    assert never_waits(Pipeline.NEVER_WAITING, 5, unknown) and not never_waits(Pipeline.ON, 0, unknown, 1.0)


def test_as_many_rounds_are_in_flight_as_are_drafted_during_a_round_trip() -> None:
    def depth(pipeline: Pipeline, rtt: float) -> int:
        return Depth(pipeline, 8, measurements(0.002, 0.009, rtt)).of(3)

    assert [depth(Pipeline.AUTO, rtt) for rtt in (0.0, 0.001, 0.02, 1.0)] == [1, 1, 4, 8]
    assert [depth(pipeline, 0.0) for pipeline in (Pipeline.OFF, Pipeline.ON)] == [1, 2]
