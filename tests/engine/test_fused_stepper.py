"""Fused rounds that the device begins by itself: the rows are those of rounds that the event loop asks for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest

from tandem.engine.batcher import Batcher
from tandem.engine.engine import Engine
from tandem.engine.fused_rounds import FusedPair, FusedRounds, FusedStepper
from tandem.engine.step_widths import StepWidths
from tandem.runners.protocol import FusedRow
from tandem.speculation.estimate import Estimate
from tandem.speculation.lookup_policy import PolicedLookup
from tandem.speculation.types import Draft, LengthPlan, Request, SpeculationStats
from tests.support import GREEDY, SAMPLED, oracle, toy
from tests.toy import ToyConfig, ToyRunner

PROMPT = list(b"a prompt")
MISS = ToyConfig(miss=0.4)
COUNT = 60


@pytest.fixture
def read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.engine.batcher.TOGETHER", 0.0)


def once(k: int) -> LengthPlan:
    return LengthPlan(k, k, lasts=False)


def stepper(rounds: FusedRounds) -> FusedStepper:
    assert rounds.stepper
    return rounds.stepper


class Copies(PolicedLookup):
    """Copies at every third length: tokens of which two are right."""

    def __init__(self, sampling: Any) -> None:
        super().__init__(Estimate())
        self.sampling = sampling

    def copy(self, tokens: Sequence[int], k: int) -> Draft:
        if len(tokens) % 3:
            return Draft()
        truth = oracle(tokens, self.sampling, 3, past_the_end=True)
        return Draft((*truth[:2], (truth[2] + 1) % 256)[:k])


class Site:
    """A fused pair of toys that notes the rows of its steps; those of `planned` take until the next is planned."""

    def __init__(self, lookup: bool = False) -> None:
        self.batcher = Batcher("ahead")
        self.target, self.draft = Engine(toy(), self.batcher), Engine(toy(MISS), self.batcher, vital=False)
        self.pair = FusedPair(self.target, self.draft)
        self.rows, self.gaps, inner = list[FusedRow](), list[float](), self.pair.step
        self.planned: FusedRounds | None = None
        self.begun, self.lookup = 0, lookup

        def step(rows: Sequence[FusedRow]) -> Any:
            self.rows += rows
            given_up = time.perf_counter() + 5
            while self.planned and stepper(self.planned).plan is None and time.perf_counter() < given_up:
                time.sleep(0.0005)  # a step takes longer than its plan
            return inner(rows)

        self.pair.step = step

    async def opened(self, sampling: Any = GREEDY, stops: Sequence[int] = (), count: int = COUNT) -> FusedRounds:
        lookup = Copies(sampling) if self.lookup else None
        rounds = FusedRounds(self.pair, Request(sampling, max_new_tokens=count), lookup, stops=stops)
        await rounds.open(PROMPT)
        return rounds

    async def rounds(self, rounds: FusedRounds, plans: Sequence[int], ahead: bool, count: int = COUNT) -> list[int]:
        """Runs rounds of these lengths, again and again; `ahead`: each is planned while the one before runs."""
        tokens, at, self.planned = list(PROMPT), 0, rounds if ahead else None
        while (left := len(PROMPT) + count - len(tokens)) > 0:
            under_way = asyncio.create_task(rounds.round(tokens, once(min(plans[at % len(plans)], left - 1))))
            await asyncio.sleep(0)
            at += 1
            if ahead:
                rounds.plan(once(plans[at % len(plans)]))
            tokens += (await under_way)[1].token_ids
            self.begun += not stepper(rounds).target.device_waits
        return tokens[len(PROMPT) :]


@pytest.mark.usefixtures("read_at_once")
@pytest.mark.each_value
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
@pytest.mark.parametrize("lookup", [False, True])
@pytest.mark.parametrize("reprocesses", [False, True])
@pytest.mark.parametrize("plans", [[3], [4, 0, 0, 2, 5, 1]])
async def test_the_device_makes_the_rows_that_the_loop_would_ask_for(
    sampling: Any, lookup: bool, reprocesses: bool, plans: list[int]
) -> None:
    async def of(ahead: bool) -> Site:
        site = Site(lookup)
        rounds = await site.opened(sampling)
        stepper(rounds).draft.keeps_drafts = not reprocesses
        tokens = await site.rounds(rounds, plans, ahead)
        assert tuple(tokens[:COUNT]) == oracle(PROMPT, sampling, COUNT, past_the_end=True)
        await rounds.close()
        await site.batcher.close()
        return site

    asked, ahead = await of(False), await of(True)
    assert asked.begun == 0 and ahead.begun >= len(ahead.rows) - 4  # the first, and where the model fills
    assert ahead.rows == asked.rows


@pytest.mark.parametrize(("model_k", "rests"), [(0, False), (2, False), (2, True), (5, True)])
async def test_a_copy_has_its_worth_whatever_the_model_may_draft(model_k: int, rests: bool) -> None:
    site = Site(lookup=True)
    made = stepper(rounds := await site.opened())
    made._widths = StepWidths(site.pair.step)
    made._widths.resting = rests
    made._tokens += oracle(PROMPT, GREEDY, 1)
    made.asked = made.latest = LengthPlan(3, model_k, of_copies=(0.9, 0.8, 0.7), of_model=(0.5, 0.2, 0.1, 0.1, 0.1))
    assert (row := made.next_row()) and len(row.copied) == 3
    assert row.worth == (0.9, 0.8, 0.7) and row.cut(1).copied == row.copied[:1]
    await rounds.close()
    await site.batcher.close()


@pytest.mark.usefixtures("read_at_once")
async def test_no_round_runs_past_a_stop_token_or_the_length() -> None:
    expected = oracle(PROMPT, GREEDY, COUNT, past_the_end=True)
    stop = expected[20]
    for stops, last in (((stop,), expected.index(stop)), ((), COUNT - 1)):
        site = Site()
        rounds, tokens = await site.opened(stops=stops), list(PROMPT)
        site.planned = rounds
        while len(tokens) <= len(PROMPT) + last:
            under_way = asyncio.create_task(rounds.round(tokens, once(3).within(len(PROMPT) + COUNT - len(tokens) - 1)))
            await asyncio.sleep(0)
            assert not stepper(rounds).gone
            rounds.plan(once(3))
            tokens += (await under_way)[1].token_ids
        taken, ended = len(site.rows), stepper(rounds)
        assert ended.gone
        await asyncio.sleep(0.02)
        assert len(site.rows) == taken and site.rows[-1].propose.position < len(PROMPT) + last
        assert tuple(tokens[len(PROMPT) :][: last + 1]) == expected[: last + 1]
        await rounds.close()
        assert ended.rests and not ended.gone  # else steps would go without one row for good
        await site.batcher.close()


async def test_the_draft_models_part_of_a_prompt_is_computed_when_it_first_drafts_and_counts_as_prefill() -> None:
    prompt, chunks, each = tuple(range(1, 65)), 4, 0.01
    site = Site()
    slow = Engine(toy(ToyConfig(step_seconds=each)), site.batcher, vital=False)
    rounds = FusedRounds(FusedPair(site.target, slow), Request(GREEDY), None, stats := SpeculationStats())
    await rounds.open(prompt)
    tokens, truth = list(prompt), oracle(prompt, GREEDY, 30, past_the_end=True)
    for k, chunks_before in ((0, 0), (3, chunks), (3, chunks)):
        draft, verdict = await rounds.round(tokens, once(k))
        tokens += verdict.token_ids
        assert len(draft.token_ids) == verdict.accepted == k
        assert chunks_before * each <= stats.prefill_seconds < chunks_before * each + 0.5
        assert (stats.prefill_seconds > 0) == (chunks_before > 0)
    assert tuple(tokens[len(prompt) :]) == truth[: len(tokens) - len(prompt)]
    await rounds.close()
    await site.batcher.close()


@pytest.mark.usefixtures("read_at_once")
async def test_a_draft_model_that_fails_is_left_to_the_loop() -> None:
    class Fails(ToyRunner):
        def propose(self, rows: Sequence[Any]) -> Any:
            if self.steps > 8:
                raise RuntimeError("gone")
            return super().propose(rows)

    site = Site()
    site.draft = Engine(toy(MISS, kind=Fails), site.batcher, vital=False)
    pair = FusedPair(site.target, site.draft)
    stats = SpeculationStats()
    rounds = FusedRounds(pair, Request(GREEDY, max_new_tokens=COUNT), stats=stats, stops=())
    await rounds.open(PROMPT)
    tokens = await site.rounds(rounds, [3], True)
    assert tuple(tokens) == oracle(PROMPT, GREEDY, COUNT, past_the_end=True)
    assert pair.health.failures == 1 and stats.undrafted_rounds > 5
    await rounds.close()
    await site.batcher.close()


@pytest.mark.usefixtures("read_at_once")
async def test_an_error_on_the_device_thread_reaches_the_request() -> None:
    class Fails(Copies):
        def copy(self, tokens: Sequence[int], k: int) -> Draft:
            if len(tokens) > len(PROMPT) + 10:
                raise ValueError("no copy")
            return Draft()

    site = Site()
    rounds = FusedRounds(site.pair, Request(GREEDY, max_new_tokens=COUNT), Fails(GREEDY), stops=())
    await rounds.open(PROMPT)
    with pytest.raises(ValueError, match="no copy"):
        await site.rounds(rounds, [3], True)
    await rounds.close()
    await site.batcher.close()
