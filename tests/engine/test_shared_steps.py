"""Requests whose rounds and chunks of prompts share steps, on real steps: what each says alone, to the bit."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.checkpoints.adapter_files import AdapterChoice, read_adapter
from tandem.engine.batcher import Batcher
from tandem.engine.engine import Engine
from tandem.engine.generators import fused_generator
from tandem.engine.load_models import Loaded
from tandem.engine.local_run import UndraftedRounds
from tandem.engine.model_config import DraftChoice
from tandem.engine.prefix_cache import PrefixSharing, share_prefixes
from tandem.engine.sequences import LocalVerifier
from tandem.runners.native.native_runner import NativeRunner
from tandem.runners.native.weights import UNQUANTISED, packing
from tandem.runners.protocol import PrefillRow, RowFailed
from tandem.speculation.types import GenerationRequest, LengthPlan, Request, Rule, SamplingParams
from tests.adapters import lora_tensors, write_adapter
from tests.daily import daily
from tests.runners.conftest import folder, target  # noqa: F401
from tests.runners.test_eagle import models, said, with_pair
from tests.runners.test_native import GREEDY, module_of, native, sequence
from tests.runners.test_quantised import WIDE

SAMPLED = SamplingParams(temperature=0.9, top_k=40, seed=7)
PROMPT, TOKENS, ROUNDS = sequence(70), 14, 6
FORMATS: dict[str, Any] = {
    "float32": (lambda: module_of(dtype=torch.float32), UNQUANTISED),
    "bfloat16": (lambda: module_of(dtype=torch.bfloat16), UNQUANTISED),
    "int8": (lambda: module_of(**WIDE), packing("int8")),
}


@dataclass(frozen=True)
class Asked:
    """A request whose prompt begins with `shared` tokens of PROMPT; `leaves`: it ends after two rounds."""

    number: int
    shared: int
    adapter: str
    sampling: SamplingParams
    leaves: bool

    @property
    def prompt(self) -> list[int]:
        return [*PROMPT[: self.shared], *sequence(3 + 4 * (self.number % 6), seed=1 + self.number)]


def asked_of(seed: int, count: int) -> list[Asked]:
    chance = random.Random(seed)
    return [
        Asked(
            number,
            chance.choice((0, 0, 20, 37)),
            chance.choice(("", "", "red", "blue")),
            chance.choice((GREEDY, replace(SAMPLED, seed=number))),
            chance.random() < 0.25,
        )
        for number in range(count)
    ]


class Mixed:
    """Counts steps of rounds beside chunks, and those with several chunks, partly known prompts, and adapters."""

    def __init__(self, runner: NativeRunner) -> None:
        self.seen, inner = Counter[str](), runner.verify

        def verify(rows: Sequence[Any]) -> Any:
            chunks = [row for row in rows if isinstance(row, PrefillRow)]
            if chunks and len(chunks) < len(rows):
                self.seen["mixed"] += 1
                self.seen["several chunks"] += len(chunks) > 1
                self.seen["known in part"] += any(chunk.prompt and chunk.start for chunk in chunks)
                self.seen["adapters"] += len({row.adapter for row in rows}) > 1
            return inner(rows)

        runner.verify = verify  # type: ignore[method-assign]


async def rounds_of(engine: Engine, asked: Asked) -> tuple[list[int], list[Any]]:
    """Tokens, and their log-probabilities, which show the logits' bits."""
    tokens, logprobs = list(asked.prompt), list[Any]()
    verifier = LocalVerifier(engine, Request(asked.sampling, logprobs=2, adapter=asked.adapter))
    try:
        await verifier.open(tokens)
        for round_ in range(2 if asked.leaves else ROUNDS):
            verdict = await verifier.verify(tokens, tokens[: round_ % 4])
            tokens += verdict.token_ids
            logprobs += verdict.logprobs
    finally:
        await verifier.close()
    return tokens, logprobs


@pytest.mark.parametrize("form", daily(FORMATS, 2))
async def test_requests_of_all_kinds_that_come_and_go_say_what_each_says_alone(form: str, tmp_path: Path) -> None:
    module, packed = FORMATS[form][0](), FORMATS[form][1]
    folders = {
        name: write_adapter(tmp_path / name, lora_tensors(module, seed, names=names))
        for seed, (name, names) in enumerate((("red", ("q_proj", "o_proj")), ("blue", ("up_proj", "down_proj"))))
    }

    async def engine_of(runner: NativeRunner) -> Engine:
        runner.warm_up()
        engine = Engine(runner, Batcher("test"))
        for name, folder_ in folders.items():
            await engine.adapters.add(AdapterChoice(name, str(folder_)), read_adapter)
        return engine

    alone = await engine_of(native(module, packing=packed))
    asked = asked_of(3, 60)
    expected = [await rounds_of(alone, one) for one in asked]
    await alone.batcher.close()
    runner = native(module, packing=packed)
    together, mixed, chance = await engine_of(runner), Mixed(runner), random.Random(5)
    await share_prefixes([together], PrefixSharing("all", 1), lambda: None)

    async def later(one: Asked) -> Any:
        await asyncio.sleep(chance.choice((0.0, 0.0, chance.random() * 0.02)))  # many at once, on any machine
        return await rounds_of(together, one)

    assert await asyncio.gather(*map(later, asked)) == expected
    for kind in ("mixed", "several chunks", "known in part", "adapters"):
        assert mixed.seen[kind], kind
    await together.batcher.close()


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
async def test_a_prompts_last_step_gives_the_first_token(sampling: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, judge, fails = Engine(native(module_of()), Batcher("test")), NativeRunner._judge, iter([])
    monkeypatch.setattr(NativeRunner, "_judge", lambda *row: next(fails, None) or judge(*row))
    for length in (1, 2, 33, 65, 100):
        prompt, request = sequence(length), Request(sampling, logprobs=2)
        verifier = LocalVerifier(engine, request)
        await verifier.open(prompt)
        expected = await verifier.verify(prompt, ())
        await verifier.close()
        for failed in range(2 + (length > 1)):  # of the prompt's verification and the round's own
            rounds, before = UndraftedRounds(LocalVerifier(engine, request), None), engine.batcher.steps
            fails = iter([RowFailed("test")] * failed)
            await rounds.open(prompt)
            _, verdict = await rounds.round(prompt, LengthPlan(0, 0))
            assert verdict.token_ids == expected.token_ids and verdict.logprobs == expected.logprobs
            assert failed or engine.batcher.steps - before == max(1, -(-(length - 1) // 64))
            await rounds.close()
    await engine.batcher.close()


def test_a_head_reads_the_features_of_prompts_that_shared_steps_with_rounds(target: Path, folder: Path) -> None:  # noqa: F811
    """What is committed under rejection depends on what the head draws from, and that on every feature."""

    async def use(pair: Loaded, draft: Loaded) -> None:
        generator = fused_generator(pair, draft, 4, DraftChoice("eagle", str(folder)))
        requests = [
            GenerationRequest(
                token_ids=tuple(range(40 + 5 * number, 60 + 11 * number)),
                sampling=replace(SAMPLED, seed=number),
                max_new_tokens=TOKENS,
                rule=Rule.REJECTION,
                ignore_end_of_sequence=True,
                speculation_length=3,
            )
            for number in range(9)
        ]
        alone = [await said(generator, request) for request in requests]
        beside = Counter[bool]()
        run_ = pair.engine.batcher.run

        def watched(step: Any, row: Any, limit: int, size: int = 1, prefill: bool = False, ahead: Any = None) -> Any:
            done = run_(step, row, limit, size, prefill, ahead)
            done.add_done_callback(lambda done: beside.update([prefill] if done.result().rows > 1 else ()))
            return done

        pair.engine.batcher.run = watched  # type: ignore[method-assign]
        together = await asyncio.gather(*(said(generator, request) for request in requests))
        for (tokens, stats), (again, counted) in zip(alone, together, strict=True):
            assert again == tokens and counted.accepted_per_position == stats.accepted_per_position
        assert beside[True] and beside[False], "prompts and rounds shared no steps"

    with_pair(models(target, "native", "float32", DraftChoice("eagle", str(folder)), slots=4), use)
