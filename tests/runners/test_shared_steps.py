"""Native steps of rounds and chunks of prompts: verdicts and caches are those of steps apart, to the bit."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from tandem.runners.fused_step import fused
from tandem.runners.native.native_runner import NativeRunner
from tandem.runners.protocol import PrefillRow, RowFailed, VerifyRow
from tests.rows import fill, fused_row, propose_row, verify_row
from tests.runners.test_native import GREEDY, SAMPLED, SLOTS, every_dtype, module_of, native, sequence


def logits_after(runner: NativeRunner, slot: int, tokens: list[int]) -> np.ndarray:  # type: ignore[type-arg]
    """What the slot's cache of all tokens but the last makes of the last."""
    found = runner.model.feed([slot], [len(tokens) - 1], [tokens[-1:]])
    assert found is not None
    return found


@every_dtype
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_rounds_beside_chunks_are_those_of_steps_apart(dtype: torch.dtype, sampling) -> None:  # type: ignore[no-untyped-def]
    together, apart = native(module_of(dtype=dtype)), native(module_of(dtype=dtype))
    chance = random.Random(4)
    for trial in range(10):
        tokens = [sequence(chance.randint(3, 90), seed=trial * 7 + slot) for slot in range(SLOTS)]
        draft = tuple(sequence(chance.randrange(6), seed=50 + trial))
        at = [chance.randrange(max(1, len(tokens[slot]) - 20)) for slot in (1, 2)]
        chunks = [
            PrefillRow(slot, start, tuple(tokens[slot][start:-1][:20])) for slot, start in zip((1, 2), at, strict=True)
        ]
        chunks = [chunk for chunk in chunks if chunk.tokens]
        for runner in (together, apart):
            fill(runner, 0, tokens[0][:-1])
            for slot, start in zip((1, 2), at, strict=True):
                fill(runner, slot, tokens[slot][:start])
        row = verify_row(0, len(tokens[0]) - 1, tokens[0][-1], draft, sampling, logprobs=3)
        verdict, *rest = together.verify([row, *chunks])
        for chunk in reversed(chunks):
            apart.prefill([chunk])
        assert rest == [None] * len(chunks) and [verdict] == apart.verify([row])
        for runner in (together, apart):
            for slot, start in zip((1, 2), at, strict=True):
                left = tokens[slot][start + 20 : -1]
                if left:
                    runner.model.feed([slot], [start + 20], [left])
        for slot in range(SLOTS):
            assert np.array_equal(logits_after(together, slot, tokens[slot]), logits_after(apart, slot, tokens[slot]))


def test_fused_rounds_beside_chunks_are_those_of_steps_apart() -> None:
    target, draft = native(module_of()), native(module_of("qwen3"), verifies=False)
    step, tokens, other = fused(target, draft), sequence(30), sequence(50, seed=9)
    fill(target, 0, tokens[:-1])
    fill(draft, 0, tokens[:-2])
    row = fused_row(propose_row(0, len(tokens) - 1, tokens[-2:], 4, GREEDY))
    (alone,) = step([row])
    beside, fed = step([row, PrefillRow(2, 0, tuple(other[:-1]))])  # type: ignore[list-item]
    assert fed is None
    assert beside.proposal.token_ids == alone.proposal.token_ids  # type: ignore[union-attr]
    assert beside.verdict.token_ids == alone.verdict.token_ids  # type: ignore[union-attr]
    assert (beside.verdict.rows, beside.verdict.step_tokens) == (2, 1 + len(beside.proposal.token_ids) + 49)  # type: ignore[union-attr]
    mixed = logits_after(target, 2, other)
    fill(target, 2, other[:-1])
    assert np.array_equal(mixed, logits_after(target, 2, other))


def test_a_row_out_of_bounds_fails_alone_whichever_kind_it_is() -> None:
    runner, tokens = native(module_of()), sequence(20)
    fill(runner, 0, tokens[:-1])
    sound = verify_row(0, 19, tokens[-1], (), GREEDY)
    good, bad = PrefillRow(1, 0, tuple(tokens)), PrefillRow(2, 0, (1, 9999))
    verdict, failed, fed = runner.verify([sound, bad, good])
    assert isinstance(failed, RowFailed) and fed is None and [verdict] == runner.verify([sound])
    broken = VerifyRow(0, 500, 1, (), sound.request)
    failed, fed = runner.verify([broken, good])
    assert isinstance(failed, RowFailed) and fed is None
