"""The pipelined loop against a simulated target in virtual time: tokens, counts, and the time that theory says."""

from __future__ import annotations

import asyncio
from types import ModuleType

import pytest

import tandem.speculation.rounds
from tandem.speculation.estimate import Times
from tandem.speculation.rounds import OutOfStep
from tandem.speculation.verification_mode import Depth, Pipeline
from tests.daily import daily
from tests.speculation.simulated import (
    PROMPT,
    Run,
    SimulatedDraft,
    SimulatedTarget,
    fixed_depth,
    generate,
    measured,
    said,
)
from tests.speculation.virtual_time import in_virtual_time


def run(
    depth: int | Depth,
    k: int,
    acceptance: float = 0.7,
    count: int = 80,
    draft_s: float = 0.001,
    draft: SimulatedDraft | None = None,
    module: ModuleType = tandem.speculation.rounds,
    **target,
) -> Run:
    return in_virtual_time(
        generate(
            SimulatedTarget(module=module, **target),
            draft or SimulatedDraft(acceptance, draft_s),
            depth if isinstance(depth, Depth) else fixed_depth(depth),
            k,
            count,
            module,
        )
    )


# --- tokens ---


def check_tokens(module: ModuleType = tandem.speculation.rounds) -> None:
    """Whatever depth, length, draft and link, also where the stream breaks again and again."""
    for depth, k, acceptance in ((1, 3, 0.6), (2, 1, 0.6), (3, 3, 0.6), (8, 5, 0.95), (3, 2, 0.0), (4, 3, 1.0)):
        for rtt, verify in ((0.0, 0.0), (0.05, 0.01), (0.001, 0.03)):
            for breaks in (frozenset(), frozenset({0, 5, 40, 60})):
                found = run(depth, k, acceptance, rtt=rtt, verify_seconds=verify, breaks=breaks, module=module)
                assert found.tokens == said(80)
                assert found.target.longest <= len(PROMPT) + 80
                assert found.target.closed


def check_counts(module: ModuleType = tandem.speculation.rounds) -> None:
    """What is sent either commits or is stale; what is stale costs the target nothing."""
    for depth, k, acceptance in ((1, 3, 0.6), (2, 3, 0.8), (5, 2, 0.9)):
        found = run(depth, k, acceptance, rtt=0.05, verify_seconds=0.004, module=module)
        stats = found.stats
        assert sum(stats.sent_by_depth) == found.target.sent == stats.rounds + stats.stale_rounds
        assert found.target.resumed == 0
        assert found.target.steps <= stats.rounds + 1  # one may be under way when the text ends
        assert stats.rounds + stats.accepted >= 80
        assert stats.max_in_flight <= depth
        assert (stats.guessed_rounds > 0) == (stats.stale_rounds > 0) == (depth > 1)
        assert stats.wasted_drafts == stats.drafted - stats.accepted + stats.stale_drafts
        ahead = stats.stale_rounds + stats.guessed_rounds
        assert stats.drafted + stats.stale_drafts <= found.draft.tokens
        assert ahead <= stats.stale_drafts + stats.guessed_rounds
        assert 0 <= stats.network_seconds <= found.seconds


def check_times(module: ModuleType = tandem.speculation.rounds) -> None:
    """TPOT is near the bound where verifications keep up with drafting."""
    for acceptance, rtt, draft_s, verify_s, k, depth in (
        (0.7, 0.1, 0.005, 0.005, 2, 4),
        (0.7, 0.05, 0.005, 0.005, 2, 4),
        (0.55, 0.1, 0.0025, 0.017, 3, 3),
        (0.9, 0.1, 0.005, 0.005, 2, 8),
    ):
        found = run(depth, k, acceptance, 500, draft_s, rtt=rtt, verify_seconds=verify_s, module=module)
        bound = draft_s + (1 - acceptance) * (rtt + verify_s)  # the draft never waits, and only a miss pays the way
        assert 0.93 * bound < found.tpot < 1.15 * bound
        waiting = (k * draft_s + verify_s + rtt) / sum(acceptance**n for n in range(k + 1))
        assert found.tpot < 0.97 * waiting
        assert run(1, k, acceptance, 500, draft_s, rtt=rtt, verify_seconds=verify_s).tpot == pytest.approx(
            waiting, rel=0.06
        )


@pytest.mark.parametrize("check", [check_tokens, check_counts, check_times])
def test_ours_obeys(check) -> None:
    check()


# --- what can go wrong ---


def test_a_draft_without_a_guess_waits_for_verdicts_and_says_the_same() -> None:
    found = run(4, 3, draft=SimulatedDraft(1.0, dry=True), count=10, rtt=0.01)
    assert found.tokens == said(10)
    assert (found.stats.rounds, found.stats.max_in_flight, found.stats.stale_rounds) == (10, 1, 0)


def test_a_round_that_is_lost_every_time_fails_with_the_cause() -> None:
    with pytest.raises(ConnectionError, match="lost"):
        run(3, 3, refuses=True, rtt=0.01)


def test_a_target_that_stays_out_of_step_is_not_asked_for_ever() -> None:
    class Forgetful(SimulatedTarget):
        async def resume(self, tokens, cause) -> None:
            self.resumed += 1

        async def open(self, prompt) -> None:
            self.tokens = [1]

    target = Forgetful()
    with pytest.raises(OutOfStep, match="round at 3 is stale: the verifier holds 1 tokens"):
        in_virtual_time(generate(target, SimulatedDraft(0.5), fixed_depth(3), 3, 20))
    assert target.resumed == 2
    assert target.closed


def test_a_draft_that_breaks_while_ahead_ends_the_request_and_closes_both() -> None:
    target = SimulatedTarget(rtt=0.05)
    draft = SimulatedDraft(1.0, 0.001, fails_at=8)
    with pytest.raises(ValueError, match="the draft model broke"):
        in_virtual_time(generate(target, draft, fixed_depth(4), 3, 60))
    assert target.closed


def test_cancelling_leaves_no_task_behind() -> None:
    async def test() -> None:
        target = SimulatedTarget(rtt=0.1)
        task = asyncio.create_task(generate(target, SimulatedDraft(0.9, 0.01), fixed_depth(4), 3, 500))
        await asyncio.sleep(0.333)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert target.closed
        await asyncio.sleep(1)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    in_virtual_time(test())


# --- depth ---


@pytest.mark.parametrize(
    ("acceptance", "times", "pipelines"),
    daily(
        [
            (0.55, Times(0.005, 0.005, 0.0), False),
            (0.6, Times(0.002, 0.01, 0.05), True),
            (0.95, Times(0.002, 0.01, 0.1), True),
        ],
        1,
        2,
    ),
)
def test_auto_waits_where_waiting_is_faster_and_goes_ahead_where_it_is_not(
    acceptance: float, times: Times, pipelines: bool
) -> None:
    depth = Depth(Pipeline.AUTO, 8, measured(times))
    rest = {"rtt": times.rtt, "verify_seconds": times.verify}
    auto = run(depth, 3, acceptance, 300, times.draft, **rest)
    fixed = {d: run(d, 3, acceptance, 300, times.draft, **rest).tpot for d in (1, 2, 4, 8)}
    assert auto.tokens == said(300)
    assert auto.tpot <= 1.15 * min(fixed.values())
    assert (auto.stats.mean_in_flight > 1.3) == pipelines
