"""The target's time on links that change under it, in simulated time: a run takes no longer than lookup does alone.

Texts repeat phrases of their own, drafts are right by chance, and what is counted are the target's real steps: their
number, and how wide each was.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence

import pytest

from tandem.speculation.drafters import NgramDrafter
from tandem.speculation.estimate import Estimate
from tandem.speculation.lookup_policy import PolicedLookup
from tandem.speculation.run_on import RunMessage, SelfPacedRun
from tandem.speculation.types import common

MOST, DEPTH, PROMPT, WRONG = 3, 12, 40, -7
DRAFT_STEP = 0.002
A_LITTLE = 1.005
"""Copies of a run are policed and lookup's are not, so single copies differ where no draft ever helps."""


def step(drafted: int) -> float:
    """Seconds of a target's step, as published of an 8B on trn2.3xlarge."""
    return 0.0254 + 0.0002 * (drafted + 1)


def doubling(now: float) -> float:
    """A round trip that doubles from one second to the next, up to 320 ms, and begins anew."""
    return float(0.020 * 2 ** (int(now) % 5))


def outages(now: float) -> float:
    """20 ms in one second of three; what is sent in the other two waits for their end."""
    within = now % 3
    return 0.020 if within < 1 else 3 - within + 0.020


def far(now: float) -> float:
    return 3.0


def a_text(noise: random.Random) -> list[int]:
    """About 300 tokens: phrases that recur, and between them tokens that were not seen before."""
    phrases = [[noise.randrange(10_000) for _ in range(noise.randint(3, 8))] for _ in range(5)]
    text: list[int] = []
    while len(text) < 300:
        text += noise.choice(phrases) if noise.random() < 0.6 else [noise.randrange(10_000, 20_000) for _ in range(3)]
    return text


def alone(text: Sequence[int]) -> float:
    """The seconds that lookup alone takes for all after the prompt."""
    drafter, at, seconds = NgramDrafter(), PROMPT, 0.0
    while at < len(text):
        room = min(MOST, len(text) - at - 1)
        copied = drafter.match(text[:at], room)[1] if room else ()
        seconds += step(len(copied))
        at += common(copied, text[at:]) + 1
    return seconds


def running(text: Sequence[int], link: Callable[[float], float], right: float, estimate: Estimate) -> float:
    """The seconds of a run whose drafter is right about a share of the tokens, and drafts from every arrival."""
    noise = random.Random(5)
    drafted = [token if noise.random() < right else WRONG for token in text]
    lookup = PolicedLookup(estimate)
    asyncio.run(lookup.open(text[:PROMPT]))
    run = SelfPacedRun(text[:PROMPT], lookup=lookup)
    now, last_arrival, under_way = 0.0, 0.0, list[tuple[float, RunMessage]]()
    run.receive(RunMessage(PROMPT, text[PROMPT - 1], (), len(text), MOST, MOST))
    while len(run.tokens) < len(text):
        while under_way and under_way[0][0] <= now:
            run.receive(under_way.pop(0)[1])
        draft = run.next_draft()
        assert draft is not None
        right_ones = common(draft, text[len(run.tokens) :])
        run.follow(text[len(run.tokens) : len(run.tokens) + right_ones + 1])
        run.stepped(len(draft), step(len(draft)), 1)
        now += step(len(draft))
        base = len(run.tokens)
        message = RunMessage(base, text[base - 1], tuple(drafted[base : base + DEPTH]), len(text), MOST, MOST)
        last_arrival = max(last_arrival, now + link(now) + MOST * DRAFT_STEP)
        under_way.append((last_arrival, message))
    return now


@pytest.mark.each_value
@pytest.mark.parametrize("right", [0.3, 0.7, 0.95])
@pytest.mark.parametrize("link", [doubling, outages, far])
def test_a_run_takes_no_longer_than_lookup_alone(link: Callable[[float], float], right: float) -> None:
    estimate, texts = Estimate(), [a_text(random.Random(seed)) for seed in range(8)]
    beside, rival = sum(running(text, link, right, estimate) for text in texts), sum(map(alone, texts))
    assert beside <= A_LITTLE * rival, f"{beside / rival:.3f} of lookup"
