"""Sequences on slots: what is kept, what is filled, and drafters whose cache never lies."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.engine.batcher import Batcher, DeviceLost
from tandem.engine.engine import Engine
from tandem.engine.fused_rounds import FusedPair, FusedRounds
from tandem.engine.model_drafter import DraftSequence, ModelDrafter
from tandem.engine.sequences import KVSequence
from tandem.runners.protocol import PrefillRow
from tandem.speculation.fallible import Backoff, DrafterHealth
from tandem.speculation.types import Request
from tests.support import GREEDY, SAMPLED, oracle, run, toy
from tests.toy import ToyConfig, ToyRunner

PROMPT = list(b"a prompt that is longer than one chunk")


class Noting(ToyRunner):
    """Notes every prefill."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.prefills: list[PrefillRow] = []

    def prefill(self, rows: Sequence[PrefillRow]) -> Any:
        self.prefills += rows
        return super().prefill(rows)


def sequence(held: Sequence[int] = ()) -> tuple[KVSequence, Noting]:
    runner = toy(kind=Noting)
    kv = KVSequence(Engine(runner, Batcher("test")), 1, Request())
    kv.held = list(held)
    return kv, runner


@pytest.mark.parametrize(
    ("held", "tokens", "kept"),
    [
        ([], [1, 2], 0),
        ([1, 2, 3], [1, 2, 3], 3),
        ([1, 2, 3], [1, 2], 2),
        ([1, 2], [1, 2, 3], 2),
        ([1, 2, 3], [1, 9, 3], 1),
        ([1, 2, 3], [9], 0),
        ([1, 2, 3], [], 0),
    ],
)
def test_keep_forgets_from_the_first_difference(held: list[int], tokens: list[int], kept: int) -> None:
    kv, _ = sequence(held)
    assert kv.truncate_to(tokens) == kept
    assert kv.held == held[:kept]


@pytest.mark.parametrize("start", [0, 1, 2, 3, 9])
def test_keep_trusts_positions_below_the_start_and_only_those(start: int) -> None:
    kv, _ = sequence([1, 2, 3])
    assert kv.truncate_to([1, 9, 3], start) == (1 if start <= 1 else 3)
    assert kv.held == [1, 2, 3][: len(kv.held)]


def test_fill_works_chunk_by_chunk_on_what_is_missing_only() -> None:
    async def test() -> None:
        kv, runner = sequence()
        await kv.fill(PROMPT)
        sizes = [(row.slot, row.start, len(row.tokens)) for row in runner.prefills]
        assert sizes == [(1, 0, 16), (1, 16, 16), (1, 32, 6)]
        assert kv.held == PROMPT
        assert kv.compute_seconds > 0
        runner.prefills.clear()
        await kv.fill(PROMPT)
        assert not runner.prefills
        kv.truncate_to(PROMPT[:10])
        await kv.fill(PROMPT[:12])
        assert runner.prefills == [PrefillRow(1, 10, tuple(PROMPT[10:12]))]
        await kv.engine.batcher.close()

    run(test())


class Counted(int):
    """A token that counts how often it is compared in Python, or in C with another object than itself."""

    comparisons = 0

    def __eq__(self, other: object) -> bool:
        Counted.comparisons += 1
        return int.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = int.__hash__


@pytest.mark.parametrize(("only_grows", "most"), [(False, 2 * 512), (True, 10)])
def test_the_row_of_a_draft_does_not_compare_the_whole_sequence(only_grows: bool, most: int) -> None:
    """Of 16,384 tokens a drafter compares a block in Python at most, and one of committed tokens alone a few."""

    async def test() -> None:
        engine = Engine(toy(max_length=20_000), Batcher("test"))
        sequence = DraftSequence(engine, 1, Request(GREEDY), 258)
        sequence.only_grows = only_grows
        tokens = [Counted(i % 251) for i in range(16_384)]
        sequence.held = tokens[:-2]
        for accepted in (None, 0, 2, 4, 5, 1):
            if accepted is not None:  # other objects of the same values, as a verdict has them
                tokens += [Counted(7 + i) for i in range(accepted)] + [Counted(99)]
            Counted.comparisons = 0
            assert not sequence.lacks(tokens)
            row = sequence.row(tokens, 5)
            assert row and row.tail == tuple(tokens[-2:])
            sequence.proposed(tokens, [Counted(7 + i) for i in range(5)])
            assert Counted.comparisons <= most
            assert sequence.held == [*tokens, 7, 8, 9, 10]
        await engine.batcher.close()

    run(test())


async def drafted(drafter: ModelDrafter, tokens: Sequence[int], k: int) -> tuple[int, ...]:
    return (await drafter.propose(tokens, k)).token_ids


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
@pytest.mark.parametrize("seed", range(4))
def test_a_drafter_proposes_what_a_fresh_one_would_whatever_was_accepted_before(sampling: Any, seed: int) -> None:
    """Full acceptance, partial, none; a skipped round; shorter and longer k: stale entries would show."""
    rng = random.Random(seed)

    async def test() -> None:
        engine = Engine(toy(ToyConfig(salt=2)), Batcher("test"))
        drafter = ModelDrafter(engine, Request(sampling), 258)
        await drafter.open(PROMPT)
        tokens = list(PROMPT)
        for accept in ["all", "none", "some", "all", "all, skip", "skip", "all", "some", "none", "none"]:
            k = rng.randrange(1, 6)
            draft = await drafted(drafter, tokens, k)
            assert draft == oracle(tokens, sampling, k, ToyConfig(salt=2), past_the_end=True)
            count = {"all": k, "none": 0, "some": rng.randrange(k + 1), "skip": 0, "all, skip": k}[accept]
            tokens += [*draft[:count], rng.randrange(256)]
            if "skip" in accept:  # rounds that this drafter never saw
                tokens += [rng.randrange(256) for _ in range(3)]
        await drafter.close()
        assert engine.slots.free == 4
        await engine.batcher.close()

    run(test())


def test_a_drafter_survives_a_cancelled_proposal() -> None:
    async def test() -> None:
        engine = Engine(toy(ToyConfig(step_seconds=0.01)), Batcher("test"))
        drafter = ModelDrafter(engine, Request(GREEDY), 258)
        await drafter.open(PROMPT)
        task = asyncio.create_task(drafter.propose([*PROMPT, 1, 2, 3], 5))
        await asyncio.sleep(0.005)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert await drafted(drafter, PROMPT, 4) == oracle(PROMPT, GREEDY, 4, past_the_end=True)
        await drafter.close()
        await engine.batcher.close()

    run(test())


def test_a_draft_ends_before_a_token_that_the_target_does_not_have() -> None:
    async def test() -> None:
        truth = oracle(PROMPT, GREEDY, 5, past_the_end=True)
        known = sorted(truth)[-1]  # the largest id is the first unknown one
        cut = truth.index(known)
        engine = Engine(toy(), Batcher("test"))
        drafter = ModelDrafter(engine, Request(GREEDY), known)
        await drafter.open(PROMPT)
        assert await drafted(drafter, PROMPT, 5) == truth[:cut]
        following = [*PROMPT, *truth[:cut], 7]
        fresh = oracle(following, GREEDY, 1, past_the_end=True)
        assert await drafted(drafter, following, 1) == tuple(t for t in fresh if t < known)
        await drafter.close()
        await engine.batcher.close()

    run(test())


def test_a_drafter_with_a_shorter_sequence_stops_drafting_when_it_is_full() -> None:
    async def test() -> None:
        engine = Engine(toy(max_length=44), Batcher("test"))
        drafter = ModelDrafter(engine, Request(GREEDY), 258)
        await drafter.open(PROMPT)  # 38 tokens
        lengths = [len(await drafted(drafter, [*PROMPT, *range(n)], 5)) for n in range(9)]
        assert lengths == [5, 5, 4, 3, 2, 1, 0, 0, 0]
        await drafter.close()
        await engine.batcher.close()

    run(test())


def test_a_trial_of_the_draft_model_that_the_targets_step_cuts_short_is_left_to_others_soon() -> None:
    class Failing(ToyRunner):
        def verify(self, rows: Sequence[Any]) -> Any:
            raise RuntimeError("this device is gone")

    async def test() -> None:
        clock = SimpleNamespace(now=0.0)
        batcher = Batcher("test")
        health = DrafterHealth("of this test", Backoff(first=1.0, longest=60.0, clock=lambda: clock.now))
        rounds = FusedRounds(
            FusedPair(Engine(toy(kind=Failing), batcher), Engine(toy(), batcher), health), Request(GREEDY)
        )
        await rounds.open(PROMPT)
        for clock.now in (0.0, 100.0, 200.0, 300.0, 400.0):  # the wait grows to 16 s
            attempt = health.attempt()
            assert attempt
            attempt.failed(RuntimeError("away"))
        clock.now = 500.0
        with pytest.raises(DeviceLost):
            await rounds.round(PROMPT, 3)
        clock.now += 1.0
        assert health.attempt()
        await rounds.close()
        await batcher.close()

    run(test())
