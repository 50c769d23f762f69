"""The loop: what it asks for, what it counts, and that it always closes what it opened."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tandem.speculation.length import FixedLength
from tandem.speculation.loop import Rounds, speculate
from tandem.speculation.rules import agree
from tandem.speculation.stopping import Stopping, TextStream
from tandem.speculation.types import Chunk, Draft, LengthPlan, SpeculationStats, Verdict
from tests.speculation.laws import PROMPT


class Script(Rounds):
    """Rounds as written: (draft, verdict). Keeps every call."""

    def __init__(self, *rounds: tuple[Draft, Verdict], on: Callable[[str], None] = lambda call: None) -> None:
        self._rounds = list(rounds)
        self._on = on
        self.calls: list[tuple] = []

    async def open(self, prompt: Sequence[int]) -> None:
        self.calls.append(("open", tuple(prompt)))
        self._on("open")

    async def round(self, tokens: Sequence[int], plan: LengthPlan) -> tuple[Draft, Verdict]:
        self.calls.append(("round", tuple(tokens), plan.k))
        self._on("round")
        await asyncio.sleep(0)
        return self._rounds.pop(0)

    async def close(self) -> None:
        self.calls.append(("close",))
        await asyncio.sleep(0)
        self.calls.append(("closed",))

    @property
    def closed(self) -> bool:
        return self.calls[-2:] == [("close",), ("closed",)]


def agreed(draft: Sequence[int], accepted: int, token: int, **costs: Any) -> tuple[Draft, Verdict]:
    return Draft(tuple(draft)), Verdict((*draft[:accepted], token), accepted, **costs)


def start(rounds, k: int = 4, most: int = 100, stats: SpeculationStats | None = None, **stops):
    stopping = Stopping(TextStream(), most, **stops)
    return speculate(PROMPT, FixedLength(k), rounds, stopping, stats or SpeculationStats())


async def collect(chunks) -> list[Chunk]:
    return [c async for c in chunks]


# --- what is asked for and counted ---


async def test_each_round_is_given_everything_committed_and_what_may_still_be_drafted():
    script = Script(agreed([10, 11, 12, 13], 2, 20), agreed([30], 1, 31), agreed([], 0, 40), agreed([], 0, 41))
    chunks = await collect(start(script, most=7))
    assert [c.token_ids for c in chunks] == [(10, 11, 20), (30, 31), (40,), (41,)]
    assert script.calls == [
        ("open", PROMPT),
        ("round", PROMPT, 4),
        ("round", (*PROMPT, 10, 11, 20), 3),
        ("round", (*PROMPT, 10, 11, 20, 30, 31), 1),
        ("round", (*PROMPT, 10, 11, 20, 30, 31, 40), 0),
        ("close",),
        ("closed",),
    ]


async def test_statistics_equal_those_counted_by_hand():
    script = Script(
        (Draft((1, 2, 3), 0.5, 0.25), Verdict((1, 2, 9), 2, queue_seconds=1.0, compute_seconds=2.0)),
        (Draft((4,), 0.5, 0.25), Verdict((8,), 0, queue_seconds=1.0, compute_seconds=2.0)),
        (Draft(), Verdict((5,), 0, compute_seconds=4.0)),
        (Draft((6, 7)), Verdict((6, 7, 8), 2)),
    )
    stats = SpeculationStats()
    await collect(start(script, most=8, stats=stats))
    assert (stats.rounds, stats.drafted, stats.accepted, stats.wasted_drafts) == (4, 6, 4, 2)
    assert stats.drafted_per_position == [3, 2, 1]
    assert stats.accepted_per_position == [2, 2, 0]
    assert stats.draft_seconds == 0.5
    assert stats.verify_seconds == 8.0
    assert stats.queue_seconds == 3.0
    assert stats.prefill_seconds >= 0


@pytest.mark.parametrize("lost", [False, True])
async def test_tokens_wait_for_a_round_that_has_ended_and_come_before_its_error(lost: bool):
    rounds, chunks = [agreed([], 0, 1), agreed([], 0, 2, following=True), agreed([], 0, 3)], []
    with pytest.raises(IndexError) if lost else contextlib.nullcontext():
        async for chunk in start(Script(*rounds[: 3 - lost]), most=3):
            chunks.append(chunk.token_ids)
    assert chunks == ([(1,), (2,)] if lost else [(1,), (2, 3)])


def test_agreement_draws_no_further_than_it_counts():
    asked: list[int] = []

    def target_draw(i: int):
        asked.append(i)
        return i

    assert agree([0, 9, 2], target_draw) == Verdict((0, 1), 1)
    assert asked == [0, 1]
    assert agree([0, 1], target_draw) == Verdict((0, 1, 2), 2)
    assert agree([], target_draw) == Verdict((0,), 0)


# --- closing ---


@pytest.mark.parametrize(
    ("stops", "before"),
    [
        ({"most": 9}, 2),
        ({"most": 9, "stop_strings": ("never said",)}, 1),
        ({"most": 9, "stop_token_ids": frozenset({1})}, 1),
        ({"most": 1}, 1),
    ],
    ids=["goes on", "its text may end it", "a token ends it", "no room"],
)
async def test_the_next_round_begins_before_a_chunk_is_read_unless_the_chunk_may_be_the_last(stops, before):
    script = Script(*[agreed([], 0, 1)] * 4)
    chunks = start(script, **stops)
    await chunks.__anext__()
    rounds = ["open", *["round"] * before]
    assert [call[0] for call in script.calls] == rounds
    await chunks.aclose()
    assert [call[0] for call in script.calls] == [*rounds, "close", "closed"], "also when the reader leaves"
