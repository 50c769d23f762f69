"""A target beside which nothing drafts: it copies from the text where that pays, and the device goes on by itself."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.engine.batcher import Batcher
from tandem.engine.engine import Engine
from tandem.engine.generators import fused_generator
from tandem.engine.load_models import Loaded
from tandem.engine.model_config import DraftChoice
from tandem.speculation.types import Chunk, GenerationEnd, GenerationRequest, Rule, SpeculationStats
from tests.daily import daily
from tests.engine.test_stepper import Slow
from tests.support import GREEDY, HANG, SAMPLED, ForgetfulRunner, oracle, toy
from tests.toy import ToyTokenizer

PROMPT = list(b"abcabcabc")
COUNT = 120


class Noting(Slow):
    """Notes how many draft tokens each step verifies. `clock` counts steps, each draft token as `each` of one."""

    each, clock = 0.0, 0.0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.drafted: list[int] = []

    def verify(self, rows: Sequence[Any]) -> Any:
        self.drafted += [len(row.draft) for row in rows]
        self.clock += 0.002 * (1 + self.each * sum(len(row.draft) for row in rows))
        return super().verify(rows)


class Repeating(Noting, ForgetfulRunner):
    """Runs into a cycle."""


class Lookup:
    """Lookup beside a toy target."""

    def __init__(self, kind: type[Noting], most: int | None = None) -> None:
        self.runner = toy(kind=kind, max_length=200)
        assert isinstance(self.runner, Noting)
        self.device = Engine(self.runner, Batcher("undrafted"))
        self.generator = fused_generator(Loaded(self.device, ToyTokenizer()), None, most, DraftChoice("ngram"))

    def generate(self, **options: Any) -> Any:
        asked = {"token_ids": tuple(PROMPT), "max_new_tokens": COUNT, "ignore_end_of_sequence": True, **options}
        return self.generator.generate(GenerationRequest(**asked))

    async def said(self, **options: Any) -> tuple[tuple[int, ...], SpeculationStats]:
        tokens = list[int]()
        async for event in self.generate(**options):
            if isinstance(event, Chunk):
                tokens += event.token_ids
        assert isinstance(event, GenerationEnd)
        return tuple(tokens), event.stats

    async def begun(self, count: int, **options: Any) -> tuple[Any, list[int]]:
        """Starts a generation, and returns it with its first tokens, at least `count`."""
        events, tokens = self.generate(**options), list[int]()
        while len(tokens) < count:
            tokens += (await anext(events)).token_ids
        return events, tokens


async def test_while_the_loop_is_held_the_device_goes_on_with_copies_and_all_is_exact() -> None:
    site = Lookup(Repeating)
    await site.said()  # after which it is known that copies pay
    events, tokens = await site.begun(20)
    before, given_up = len(site.runner.drafted), time.perf_counter() + HANG / 4
    while len(site.runner.drafted) < before + 6 and time.perf_counter() < given_up:
        time.sleep(0.001)  # the event loop does nothing
    assert sum(site.runner.drafted[before : before + 6]) > 6, "steps that nobody has asked for yet verify copies"
    async for event in events:
        tokens += event.token_ids if isinstance(event, Chunk) else ()
    assert tuple(tokens) == oracle(PROMPT, GREEDY, COUNT, past_the_end=True, memory=1)
    await site.device.batcher.close()


PAYING = [(Noting, 0.5, False), (Repeating, 0.02, True), (Repeating, 4.0, False)]
"""A text that never repeats, and one that does; and one that does on a device that gains nothing by it."""


@pytest.mark.parametrize(("kind", "each", "proposes"), daily(PAYING, 0, 1))
async def test_copies_that_never_pay_are_not_proposed_once_that_is_learned_and_those_that_pay_are(
    kind: type[Noting], each: float, proposes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Lookup(kind)
    site.runner.each, site.runner.seconds = each, 0.0
    timed = SimpleNamespace(perf_counter=lambda: site.runner.clock)  # what a busy machine adds is not counted
    monkeypatch.setattr("tandem.engine.batcher.time", timed)
    first = (await site.said())[1].drafted
    for number in range(3):
        await site.said(token_ids=(*PROMPT, number))
    tokens, stats = await site.said()
    memory = 1 if kind is Repeating else None
    assert tokens == oracle(PROMPT, GREEDY, COUNT, past_the_end=True, memory=memory)
    assert first > 0, "something is tried"
    assert stats.drafted > COUNT // 2 if proposes else stats.drafted < COUNT // 4, stats
    await site.device.batcher.close()


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
async def test_a_request_for_no_drafts_beside_a_model_neither_copies_nor_computes_the_models_prompt(
    sampling: Any,
) -> None:
    site, draft = Lookup(Noting), toy()
    drafting = Loaded(Engine(draft, site.device.batcher, vital=False), ToyTokenizer())
    target = Loaded(site.device, ToyTokenizer())
    site.generator = fused_generator(target, drafting, 3, DraftChoice("hybrid", "toy"))
    for rule in Rule:
        tokens, stats = await site.said(sampling=sampling, rule=rule, speculation_length=0)
        assert tokens == oracle(PROMPT, sampling, COUNT, past_the_end=True)
        assert (stats.drafted, stats.rounds, draft.steps) == (0, COUNT, 0)
    assert (await site.said(sampling=sampling))[1].drafted > 0 < draft.steps
    await site.device.batcher.close()
