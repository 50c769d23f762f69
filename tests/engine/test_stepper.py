"""Steppers make rows on the device's thread: tokens are exact, and who comes or goes waits for one step."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest

from tandem.engine.batcher import Batcher, StepHung
from tandem.engine.engine import Engine
from tandem.engine.generators import plain_generator
from tandem.engine.load_models import Loaded
from tandem.engine.local_run import LocalRunVerifier
from tandem.engine.sequences import LocalVerifier, RunStepper
from tandem.engine.stepper import MOST_AHEAD
from tandem.speculation.estimate import Estimate
from tandem.speculation.run_on import DRAFTING, RunMessage, SelfPacedRun
from tandem.speculation.types import Chunk, GenerationEnd, GenerationRequest, Request, Verdict
from tests.support import GREEDY, oracle, toy
from tests.toy import ToyRunner, ToyTokenizer

PROMPT = list(b"a prompt")


class Slow(ToyRunner):
    """Notes the slots of each step, prefill or not, which takes a moment."""

    seconds = 0.002

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.ran: list[tuple[str, tuple[int, ...]]] = []

    def prefill(self, rows: Sequence[Any]) -> Any:
        self.ran.append(("prefill", tuple(row.slot for row in rows)))
        return super().prefill(rows)

    def verify(self, rows: Sequence[Any]) -> Any:
        self.ran.append(("verify", tuple(row.slot for row in rows)))
        time.sleep(self.seconds)
        return super().verify(rows)

    @property
    def verified(self) -> int:
        return sum(kind == "verify" for kind, _ in self.ran)


def engine() -> tuple[Engine, Slow]:
    runner = toy(kind=Slow)
    return Engine(runner, Batcher("ahead")), runner


def expected_of(prompt: list[int], sampling: Any, count: int) -> list[int]:
    return list(oracle(prompt, sampling, count, past_the_end=True))


async def generated(engine: Engine, **options: Any) -> tuple[list[int], GenerationEnd]:
    tokens = list[int]()
    generator = plain_generator(Loaded(engine, ToyTokenizer()))
    async for event in generator.generate(GenerationRequest(**{"token_ids": tuple(PROMPT), **options})):
        if isinstance(event, Chunk):
            tokens += event.token_ids
    assert isinstance(event, GenerationEnd)
    return tokens, event


async def ahead_of(runner: Slow, began: int) -> int:
    """Holds the event loop until the device has stopped by itself; returns the steps that it took meanwhile."""
    at = -1
    while at != runner.verified:
        at = runner.verified
        time.sleep(20 * runner.seconds)
    return at - began


class Plain(LocalVerifier):
    """A verifier whose device goes on with plain steps."""

    async def open(self, prompt: Sequence[int]) -> None:
        await super().open(prompt)
        self.go_on(prompt)

    def go_on(self, tokens: Sequence[int]) -> None:
        assert self.sequence
        end = self.sequence.most_tokens(len(PROMPT))
        run = SelfPacedRun(tokens, max_unread=end)
        run.receive(RunMessage(len(tokens), tokens[-1], (), end, 0))
        self.sequence.set_stepper(RunStepper(self.sequence, run))

    async def step(self) -> Verdict:
        assert self.sequence
        found = await self.sequence.next_verdict()
        assert found is not None
        return found[1]


def opened(device: Engine, most: int = 60) -> Plain:
    return Plain(device, Request(GREEDY, max_new_tokens=most))


async def test_the_device_goes_on_by_itself_up_to_a_bound() -> None:
    device, runner = engine()
    verifier, tokens = opened(device), list(PROMPT)
    await verifier.open(tokens)
    tokens += (await verifier.step()).token_ids
    taken = await ahead_of(runner, 0)
    assert MOST_AHEAD <= taken <= MOST_AHEAD + 2
    while len(tokens) < len(PROMPT) + 60:
        tokens += (await verifier.step()).token_ids
    assert tokens == PROMPT + expected_of(PROMPT, GREEDY, 60)
    assert runner.verified == 60 > taken
    await verifier.close()
    await device.batcher.close()


async def test_a_text_that_ends_does_not_hold_up_the_steps_of_others() -> None:
    device, runner = engine()
    verifiers = {60: opened(device), 4: opened(device, most=4)}
    for verifier in verifiers.values():
        await verifier.open(PROMPT)
    first = await asyncio.gather(*(verifier.step() for verifier in verifiers.values()))
    assert await ahead_of(runner, 0) > 4  # the event loop has not heard of the short text's end
    for (most, verifier), verdict in zip(verifiers.items(), first, strict=True):
        tokens = list(verdict.token_ids)
        while len(tokens) < most:
            tokens += (await verifier.step()).token_ids
        assert tokens == expected_of(PROMPT, GREEDY, most)
        await verifier.close()
    assert runner.verified <= 61  # at most one step without the other
    await device.batcher.close()


async def test_no_step_runs_past_a_stop_token_or_the_length() -> None:
    expected = expected_of(PROMPT, GREEDY, 30)
    stop = expected[12]
    for options, count in (
        ({"max_new_tokens": 30, "stop_token_ids": (stop,)}, expected.index(stop) + 1),
        ({"max_new_tokens": 9}, 9),
    ):
        device, runner = engine()
        tokens, _ = await generated(device, ignore_end_of_sequence=True, **options)
        await device.batcher.close()
        assert tokens == expected[:count]
        assert runner.verified == count


async def test_a_newcomer_waits_for_the_step_that_runs_and_no_longer() -> None:
    device, runner = engine()
    first = asyncio.create_task(generated(device, max_new_tokens=140, ignore_end_of_sequence=True))
    while runner.verified < 10:
        await asyncio.sleep(0.001)
    second, before = opened(device, most=5), len(runner.ran)
    opening = asyncio.create_task(second.open(PROMPT))
    await opening
    new = runner.ran[before:]
    assert new.index(("prefill", (1,))) <= 2
    await second.close()
    tokens, _ = await first
    assert tokens == expected_of(PROMPT, GREEDY, 140)
    await device.batcher.close()


async def test_who_leaves_waits_for_one_step_and_leaves_a_clean_slot() -> None:
    device, runner = engine()
    leaving = asyncio.create_task(generated(device, max_new_tokens=140, ignore_end_of_sequence=True))
    while runner.verified < 10:
        await asyncio.sleep(0.001)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    at = runner.verified
    assert await ahead_of(runner, at) <= 1
    other = list(b"another prompt")
    tokens, _ = await generated(device, token_ids=tuple(other), max_new_tokens=20, ignore_end_of_sequence=True)
    assert tokens == expected_of(other, GREEDY, 20)
    assert {slots for _, slots in runner.ran} == {(0,)}
    await device.batcher.close()


async def test_a_run_whose_step_hangs_is_told_and_its_sequence_goes_on_exactly() -> None:
    device, _ = engine()
    verifier, tokens = opened(device), list(PROMPT)
    await verifier.open(tokens)
    tokens += (await verifier.step()).token_ids
    device.batcher.abandon("a step hangs")
    with pytest.raises(StepHung):
        for _ in range(MOST_AHEAD + 2):
            tokens += (await verifier.step()).token_ids
    while device.batcher.running[1]:
        await asyncio.sleep(0.001)
    verifier.go_on(tokens)
    while len(tokens) < len(PROMPT) + 30:
        tokens += (await verifier.step()).token_ids
    assert tokens == PROMPT + expected_of(PROMPT, GREEDY, 30)
    await verifier.close()
    await device.batcher.close()


class Steps:
    """A run of a local target on the engine, and the steps that it was told of."""

    def __init__(self, device: Engine, count: int) -> None:
        self.verifier = LocalVerifier(device, Request(GREEDY, max_new_tokens=count))
        self.steps, self.text = list[Verdict](), [*PROMPT, *expected_of(PROMPT, GREEDY, count)]
        self.run = LocalRunVerifier(self.verifier, Estimate())
        self.until = len(self.text)

    def send(self, base: int, draft: Sequence[int] = ()) -> None:
        self.run.send(RunMessage(base, self.text[base - 1], tuple(draft), self.until, 4))

    async def begin(self) -> None:
        await self.run.open(PROMPT)
        self.run.begin(PROMPT, self.told)
        self.send(len(PROMPT))

    def told(self, step: Verdict | Exception) -> None:
        assert isinstance(step, Verdict), step
        self.steps.append(step)

    @property
    def tokens(self) -> list[int]:
        return [*PROMPT, *(token for step in self.steps for token in step.token_ids)]


async def test_a_run_steps_on_while_the_loop_is_held_and_is_read_together_unless_drafts_come() -> None:
    device, runner = engine()
    steps = Steps(device, 100)
    await steps.begin()
    while len(steps.steps) < DRAFTING + 2:
        await asyncio.sleep(0.001)
    began = runner.verified
    assert await ahead_of(runner, began) >= MOST_AHEAD - 2
    told, reads, largest = len(steps.steps), 0, 0
    while len(steps.steps) < told + 60:
        await asyncio.sleep(0)
        if (new := len(steps.steps)) > told + largest:
            reads, largest = reads + 1, new - told
    assert reads <= 40  # of 60 steps of 2 ms
    steps.send(len(steps.tokens) - 1)
    while len(steps.tokens) < steps.until:
        await asyncio.sleep(0.001)
    assert steps.tokens == steps.text and all(step.drafted == 0 for step in steps.steps)
    await steps.run.close()
    await device.batcher.close()
