"""Simulated sessions for length policies: known acceptance and costs, seeded noise, no clock and no models."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tandem.speculation.length import FixedLength
from tandem.speculation.types import Draft, LengthPlan, Proposer, Verdict

Rates = Callable[[int, int], float]
"""(absolute position, position in the draft) -> how likely a draft token is accepted if those before it were."""


def constant(rate: float) -> Rates:
    return lambda position, i: rate


def phases(*parts: tuple[int, float]) -> Rates:
    """(tokens, rate) one after the other, over and over."""
    total = sum(length for length, _ in parts)

    def rate(position: int, i: int) -> float:
        at = position % total
        for length, value in parts:
            if at < length:
                return value
            at -= length
        raise AssertionError

    return rate


@dataclass(frozen=True)
class World:
    """Seconds and acceptance. `asking`: what asking a model for drafts costs (remote_draft's round trip).

    `noise`: standard deviation of a step's log time; every 40th step or so takes `spike` times as long.
    """

    acceptance: Rates
    verify: float = 0.030
    position: float = 0.0008
    draft: float = 0.004
    each_round: float = 0.001
    asking: float = 0.0
    noise: float = 0.05
    spike: float = 3.0
    rows: int = 1
    doubts: bool = False  # the draft knows its acceptance, and ends below the plan's least


@dataclass
class Session:
    """Runs one policy over one world. The same seed gives every policy the same text: agreement is by position."""

    world: World
    policy: FixedLength
    seed: int = 0
    lengths: list[int] = field(default_factory=list)

    def run(self, tokens: int) -> float:
        """Seconds that `tokens` tokens take."""
        noise = random.Random(f"noise {self.seed}")
        done, seconds = 0, 0.0
        while done < tokens:
            length = self.policy.choose(tokens - done)
            assert 0 <= length.k < tokens - done or length.k == 0
            draft, verdict, took = self._round(length, done, noise)
            self.lengths.append(len(draft.token_ids))
            self.policy.observe(length.k, draft, verdict, took)
            done += len(verdict.token_ids)
            seconds += took
        return seconds

    def _round(self, length: LengthPlan, position: int, noise: random.Random) -> tuple[Draft, Verdict, float]:
        world, accepted = self.world, 0
        most = n = length.model_k
        if world.doubts:
            rates = [world.acceptance(position + i, i) for i in range(n)]
            n = next((i for i in range(1, n) if math.prod(rates[:i]) < length.least), n)
        while accepted < n and _text(self.seed, position + accepted) < world.acceptance(position + accepted, accepted):
            accepted += 1
        verify = (world.verify + world.position * world.rows * (n + 1)) * _shaken(world, noise)
        drafting = n * world.draft * _shaken(world, noise)
        beside = (world.each_round + (world.asking if n else 0.0)) * _shaken(world, noise)
        draft = Draft((0,) * n, 0.0, drafting, (Proposer.MODEL,) * n, rows=world.rows, doubted=n < most)
        verdict = Verdict((0,) * (accepted + 1), accepted, 0.0, verify, rows=world.rows, width=n + 1)
        return draft, verdict, verify + drafting + beside


def _text(seed: int, position: int) -> float:
    """How hard the token of a position is, uniform in [0, 1)."""
    chance = random.Random(f"{seed} {position}")
    chance.random()  # it once said whether a copy is found there
    return chance.random()


def _shaken(world: World, noise: random.Random) -> float:
    factor = noise.lognormvariate(0, world.noise) if world.noise else 1.0
    return factor * (world.spike if world.spike > 1 and noise.random() < 0.025 else 1.0)


def quiet(world: World) -> World:
    return dataclasses.replace(world, noise=0.0, spike=1.0)


def total(worlds: Sequence[World], policy: Callable[[], FixedLength], tokens: int) -> float:
    """Seconds of one session in each world, one after the other."""
    seconds = 0.0
    for seed, world in enumerate(worlds):
        seconds += Session(world, policy(), seed).run(tokens)
    return seconds
