"""Same row, same bits, on the real target: nothing about a step's shape or company reaches the logits of a token."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem.runners.batch_invariance import check_batch_invariance
from tandem.runners.protocol import Limits, VerifyRow
from tandem.speculation.types import SamplingParams
from tests.rows import fill, verify_row
from tests.runners import real

COUNT = 16
pytestmark = [pytest.mark.thorough, pytest.mark.timeout(300)]
# Module code is slow: it is tried where its bits are hardest to keep.
every_step = pytest.mark.parametrize(
    ("dtype", "compile"),
    [("bfloat16", "native"), ("float32", "native"), ("as-stored/float32", "native"), ("bfloat16", "off")],
)
every_step_and_sampling = pytest.mark.parametrize(
    ("dtype", "compile", "sampling"),
    [
        ("bfloat16", "native", real.GREEDY),
        ("bfloat16", "native", real.SAMPLED),
        ("float32", "native", real.GREEDY),
        ("float32", "native", real.SAMPLED),
        ("int8/float32", "native", real.GREEDY),
        ("as-stored/bfloat16", "native", real.SAMPLED),
        ("bfloat16", "off", real.SAMPLED),
    ],
)


@every_step
def test_every_step_shape_of_the_real_target_gives_identical_bits(dtype: str, compile: str) -> None:
    shapes = real.target(dtype, compile).shapes
    assert shapes.bit_exact
    assert shapes.widths == (1, 2, 3, 4, 5, 6) and shapes.batches == (1, 2, 3, 4)


@every_step_and_sampling
def test_logits_behind_committed_tokens_do_not_depend_on_speculation_rows_or_neighbours(
    dtype: str, compile: str, sampling: SamplingParams
) -> None:
    runner, chance = real.target(dtype, compile), random.Random(1)
    for prompt in map(real.prompt_tokens, real.PROMPTS[:2]):
        truth, behind = real.plain(runner, prompt, COUNT + 6, sampling)
        for slot in (0, 3):
            assert speculated(runner, prompt, truth, behind, slot, sampling, chance) >= 1


def speculated(runner, prompt, truth, behind, slot, sampling, chance) -> int:  # type: ignore[no-untyped-def]
    """Rounds with planted rejections in `slot` beside random neighbours; returns how many drafts were rejected."""
    fill(runner, slot, prompt[:-1])
    tokens, rejections = list(prompt), 0
    while (done := len(tokens) - len(prompt)) < COUNT:
        drafted = real.planted_draft(truth[done:], chance.randrange(6), chance)
        rows = [verify_row(slot, len(tokens) - 1, tokens[-1], drafted, sampling)]
        others = [s for s in range(4) if s != slot]
        rows += [noise_row(s, chance) for s in chance.sample(others, chance.randrange(4))]
        chance.shuffle(rows)
        mine = next(i for i, row in enumerate(rows) if row.slot == slot)
        logits = real.logits_of(runner, rows, mine)
        verdict = runner.verify(rows)[mine]
        for column, token in enumerate(verdict.token_ids):
            assert torch.equal(logits[column], behind[done + column]), f"token {done + column}, column {column}"
            assert token == truth[done + column]
        rejections += verdict.accepted < len(drafted)
        tokens += verdict.token_ids
    return rejections


def noise_row(slot: int, chance: random.Random) -> VerifyRow:
    drafted = tuple(chance.randrange(40000) for _ in range(chance.randrange(6)))
    return verify_row(slot, chance.randrange(1, 200), chance.randrange(40000), drafted, real.GREEDY)


@pytest.mark.parametrize("compile", ["native", "off"])
def test_float32_greedy_equals_transformers_generate(compile: str) -> None:
    module = AutoModelForCausalLM.from_pretrained(real.checkpoint().folder, dtype=torch.float32)
    runner = real.load(real.checkpoint(), "float32", compile, verifies=False)  # all layers, not certified
    for prompt in map(real.prompt_tokens, real.PROMPTS[:2]):
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            theirs = module.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, min_new_tokens=30, do_sample=False
            )[0, len(prompt) :]
        tokens = list(prompt)
        fill(runner, 1, prompt[:-1])
        ends = set(runner.identity.end_of_sequence_ids)
        for _ in range(30):
            logits = real.logits_of(runner, [verify_row(1, len(tokens) - 1, tokens[-1], (), real.GREEDY)])[0].clone()
            logits[list(ends)] = -torch.inf  # min_new_tokens does the same on their side
            tokens.append(int(logits.argmax()))
        assert tokens[len(prompt) :] == theirs.tolist()


class Perturbed:
    """The real model with a planted fault: logits that depend on the shape of the step."""

    def __init__(self, fault: str) -> None:
        self._model, self._fault = real.target("float32", "off").model, fault

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)

    def forward(self, slots, tokens, starts, length=None, head=True):  # type: ignore[no-untyped-def]
        out = self._model.forward(slots, tokens, starts, length, head).clone()
        if head and self._fault == "width" and tokens.shape[1] == 3:
            out[..., 17] += 1e-4
        if head and self._fault == "column":
            out[:, 4:, 17] += 1e-4
        if head and self._fault == "batch" and len(slots) == 2:
            out[1] += 1e-4
        if head and self._fault == "length" and length == 128 and tokens.shape[1] == 16:
            out[0, 3, 17] += 1e-4
        return out


def perturbed(fault: str) -> tuple[Any, Limits]:
    return Perturbed(fault), real.target("float32", "off").limits


@pytest.mark.parametrize(("fault", "exact"), [("width", True), ("batch", True), ("column", False)])
def test_certification_sees_a_planted_dependence_on_shape(fault: str, exact: bool) -> None:
    model, limits = perturbed(fault)
    shapes = check_batch_invariance(model, limits, (1, 3, 6), (1, 2, 4))
    assert (shapes.widths, shapes.batches) == ((6,), (4,))
    assert shapes.bit_exact is exact


@pytest.mark.parametrize(("fault", "lengths"), [("none", (128,)), ("length", ())])
def test_a_cache_length_that_changes_bits_is_not_used(fault: str, lengths: tuple[int, ...]) -> None:
    model, limits = perturbed(fault)
    shapes = check_batch_invariance(model, limits, (1, 6), (1,), (128,), (16, 64))
    assert shapes.bit_exact
    assert (shapes.lengths, shapes.prefill_lengths, shapes.chunks) == ((128,), lengths, (16, 64))
