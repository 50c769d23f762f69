"""Adapters of an engine: each request gets its own, whatever steps and prefixes it shares."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from itertools import product

import pytest

from tandem.checkpoints.adapter_files import Adapter, AdapterChoice
from tandem.checkpoints.locate import CheckpointError
from tandem.engine.adapter_registry import MOST
from tandem.engine.batcher import Batcher
from tandem.engine.engine import Engine
from tandem.engine.prefix_cache import PrefixSharing, share_prefixes
from tandem.engine.sequences import LocalVerifier
from tandem.speculation.types import InvalidField, Request, SamplingParams, SpeculationStats
from tests.support import GREEDY, SAMPLED, oracle, toy
from tests.toy import BACKEND, ToyConfig

PROMPT = tuple(b"a prompt that is longer than two pages of tokens, by some")
NAMES = ("", "red", "blue")
both_samplings = pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])


def truth(name: str, sampling: SamplingParams, count: int, prompt: Sequence[int] = PROMPT) -> tuple[int, ...]:
    """What the toy target with this adapter says, by definition."""
    return oracle(prompt, sampling, count, past_the_end=True, adapter=name)


@contextlib.asynccontextmanager
async def engine_with(*names: str, prefixes: bool = False) -> AsyncIterator[Engine]:
    engine = Engine(toy(ToyConfig(step_seconds=0.001)), Batcher("test"), vital=False)
    for name in names:
        await add(engine, name)
    if prefixes:
        await share_prefixes([engine], PrefixSharing("all", 1), lambda: None)
    try:
        yield engine
    finally:
        await engine.batcher.close()


async def add(engine: Engine, name: str) -> None:
    await engine.adapters.add(AdapterChoice(name, name), BACKEND.adapter)


async def said(
    engine: Engine, name: str, sampling: SamplingParams, count: int, prompt: Sequence[int] = PROMPT
) -> tuple[tuple[int, ...], int]:
    """What a request says, speculating with drafts that are right for no adapter, and what was cached of its prompt."""
    stats = SpeculationStats()
    verifier, tokens = LocalVerifier(engine, Request(sampling, adapter=name), stats=stats), list(prompt)
    try:
        await verifier.open(tokens)
        while len(tokens) < len(prompt) + count:
            draft = truth("", sampling, len(tokens) % 4, tokens)
            tokens += (await verifier.verify(tokens, draft)).token_ids
    finally:
        await verifier.close()
    return tuple(tokens[len(prompt) :][:count]), stats.cached_prompt_tokens


@both_samplings
async def test_a_kept_prefix_is_found_by_requests_of_the_same_adapter_alone(sampling: SamplingParams) -> None:
    async with engine_with("red", "blue", prefixes=True) as engine:
        for first, then in product(NAMES, NAMES):
            prompt = (len(first), len(then), *PROMPT[2:])
            assert await said(engine, first, sampling, 6, prompt) == (truth(first, sampling, 6, prompt), 0)
            found = len(prompt) // 16 * 16 if first == then else 0
            assert await said(engine, then, sampling, 6, prompt) == (truth(then, sampling, 6, prompt), found)


async def test_what_cannot_be_added_is_refused_by_name_and_changes_nothing() -> None:
    def broken(choice: AdapterChoice) -> Adapter:
        raise CheckpointError("no such folder")

    async with engine_with("red") as engine:
        with pytest.raises(ValueError, match="adapters: 'toy' is the model's own name"):
            await add(engine, "toy")
        with pytest.raises(CheckpointError, match="no such folder"):
            await engine.adapters.add(AdapterChoice("blue", "blue"), broken)
        assert engine.adapters.revisions == {"red": "toy:red"}
        for n in range(MOST - 1):
            await add(engine, f"n{n}")
        with pytest.raises(ValueError, match="one more than 64 adapters"):
            await add(engine, "one-more")
        with pytest.raises(InvalidField, match="adapter: 'green' is not one of: n0"):
            await LocalVerifier(engine, Request(GREEDY, adapter="green")).open(PROMPT[:2])
