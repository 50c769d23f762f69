"""What a sequence leaves in its slot must not reach the slot's next one: NaN that is masked is still NaN (G7)."""

from __future__ import annotations

import pytest
import torch

from tandem.engine.batcher import Batcher
from tandem.engine.engine import Engine
from tandem.engine.fused_rounds import FusedPair, FusedRounds
from tandem.engine.sequences import LocalVerifier
from tandem.runners.protocol import RowFailed
from tandem.runners.torch.torch_runner import TorchRunner
from tandem.speculation.types import LengthPlan, Request, SamplingParams
from tests.runners.compiled import GREEDY, PROMPT, eager

SAMPLED = SamplingParams(temperature=0.8, seed=3)


def own(draft: bool = False) -> TorchRunner:
    """Not the runner that other tests share: NaN stays in its slots."""
    return eager.__wrapped__(draft=draft)


def spoil(runner: TorchRunner, start: int = 0) -> None:
    """As after a sequence whose numbers overflowed, from position `start` of every slot on."""
    slots = runner.model.slots
    for buffer in slots.buffers:
        buffer.view(buffer.shape[0], -1, slots.length, buffer.shape[2])[:, : slots.spare, start:] = torch.nan


async def said(engine: Engine, sampling: SamplingParams, count: int = 8) -> list[int]:
    verifier, tokens = LocalVerifier(engine, Request(sampling)), list(PROMPT)
    await verifier.open(tokens)
    try:
        for _ in range(count):
            tokens += (await verifier.verify(tokens, ())).token_ids
    finally:
        await verifier.close()
    return tokens


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
async def test_the_next_sequence_of_a_poisoned_slot_says_what_it_always_says(sampling: SamplingParams) -> None:
    batcher = Batcher("test")
    engine = Engine(own(), batcher)
    expected = await said(engine, sampling)
    spoil(engine.runner)  # type: ignore[arg-type]
    assert await said(engine, sampling) == expected
    assert engine.slots.free == engine.slots.count
    await batcher.close()


async def test_a_fused_round_recovers_too() -> None:
    target, draft = own(), own(draft=True)
    batcher = Batcher("test")
    pair = FusedPair(Engine(target, batcher), Engine(draft, batcher, vital=False))
    expected = await said(pair.target, GREEDY)
    spoil(target)
    rounds, tokens = FusedRounds(pair, Request(GREEDY)), list(PROMPT)
    await rounds.open(tokens)
    while len(tokens) < len(expected):
        tokens += (await rounds.round(tokens, LengthPlan(3, 3)))[1].token_ids
    assert tokens[: len(expected)] == expected
    await rounds.close()
    await batcher.close()


async def test_a_sequence_that_poisons_itself_fails_and_its_slot_serves_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batcher = Batcher("test")
    runner = own()
    engine = Engine(runner, batcher)
    expected = await said(engine, GREEDY)
    with monkeypatch.context() as patched:
        forward = runner.model.forward

        def overflowing(*args: object, **rest: object) -> torch.Tensor:
            spoil(runner)
            return forward(*args, **rest)  # type: ignore[arg-type]

        patched.setattr(runner.model, "forward", overflowing)
        with pytest.raises(RowFailed, match="target logits"):
            await said(engine, GREEDY)
    assert await said(engine, GREEDY) == expected
    await batcher.close()
