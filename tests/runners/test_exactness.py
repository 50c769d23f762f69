"""Same row, same bits, on the real target: nothing about a step's shape or company reaches the logits of a token."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem.engine.batcher import Batcher
from tandem.engine.engine import Engine
from tandem.engine.fused_rounds import FusedPair, FusedRounds
from tandem.engine.model_drafter import ModelDrafter
from tandem.engine.sequences import LocalVerifier
from tandem.runners.batch_invariance import check_batch_invariance
from tandem.runners.protocol import VerifyRow
from tandem.speculation.drafters import NgramDrafter
from tandem.speculation.draws import draw
from tandem.speculation.estimate import Estimate
from tandem.speculation.hybrid import HybridDrafter
from tandem.speculation.length import FixedLength
from tandem.speculation.lookup_policy import PolicedLookup
from tandem.speculation.loop import Rounds, speculate
from tandem.speculation.rounds import DraftedRounds
from tandem.speculation.stopping import Stopping, StopRules
from tandem.speculation.types import Request, SamplingParams, SpeculationStats
from tests.rows import propose_row, verify_row
from tests.runners import real
from tests.speculation.laws import chi_square_p_value

COUNT = 16
pytestmark = [pytest.mark.thorough, pytest.mark.timeout(300)]
both_steps = pytest.mark.parametrize("compile", real.COMPILE)
# Module code is slow: it is tried where its bits are hardest to keep.
every_step = pytest.mark.parametrize(
    ("dtype", "compile"),
    [
        ("bfloat16", "native"),
        ("float32", "native"),
        ("as-stored/float32", "native"),
        ("bfloat16", "off"),
    ],
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
    ids=[
        "bfloat16",
        "bfloat16-sampled",
        "float32",
        "float32-sampled",
        "int8",
        "as-stored-sampled",
        "bfloat16-module-sampled",
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
    real.fill(runner, slot, prompt[:-1])
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


@every_step
def test_logits_survive_a_rebuild_of_the_cache_from_the_prefix(dtype: str, compile: str) -> None:
    runner = real.target(dtype, compile)
    prompt = real.prompt_tokens(real.PROMPTS[0])
    truth, behind = real.plain(runner, prompt, COUNT, real.GREEDY)
    for done in (1, 7, COUNT - 1):
        tokens = prompt + truth[:done]
        real.fill(runner, 3, [5] * 200)  # another sequence was here before
        real.fill(runner, 3, tokens[:-1])
        logits = real.logits_of(runner, [verify_row(3, len(tokens) - 1, tokens[-1], (), real.GREEDY)])
        assert torch.equal(logits[0], behind[done])


class Silent:
    def push(self, token: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


async def generate(rounds: Rounds, prompt: list[int], sampling: SamplingParams, k: int) -> tuple[list[int], float]:
    stats, out = SpeculationStats(), []
    stopping = Stopping(StopRules(COUNT), Silent())
    async for chunk in speculate(prompt, FixedLength(k), rounds, stopping, stats):
        out += chunk.token_ids
    return out, stats.accepted


@every_step_and_sampling
def test_every_architecture_emits_the_tokens_of_plain_decoding_alone_and_batched(
    dtype: str, compile: str, sampling: SamplingParams
) -> None:
    prompts = [real.prompt_tokens(p) for p in real.PROMPTS]
    expected = [real.plain(real.target(dtype, compile), p, COUNT, sampling)[0] for p in prompts]

    async def run() -> tuple[list[list[int]], float]:
        batcher = Batcher("test")
        engine, drafting = Engine(real.target(dtype, compile), batcher), Engine(real.draft(dtype, compile), batcher)
        request = Request(sampling)
        kinds = [
            lambda: DraftedRounds(LocalVerifier(engine, request)),
            lambda: DraftedRounds(LocalVerifier(engine, request), NgramDrafter()),
            lambda: DraftedRounds(LocalVerifier(engine, request), ModelDrafter(drafting, request, 49152)),
            lambda: DraftedRounds(
                LocalVerifier(engine, request),
                HybridDrafter(PolicedLookup(Estimate()), ModelDrafter(drafting, request, 49152)),
            ),
        ]
        pair = FusedPair(engine, drafting)
        fused = [
            lambda: FusedRounds(pair, request),
            lambda: FusedRounds(pair, request, lookup=PolicedLookup(Estimate())),
        ]
        outputs: list[list[int]] = []
        accepted = 0.0
        for group in (kinds, fused):  # FusedRounds gives slots of its draft out by the target's number
            jobs = [generate(kind(), p, sampling, k) for kind in group for p, k in zip(prompts, (5, 3, 2), strict=True)]
            for tokens, count in await asyncio.gather(*jobs):
                outputs.append(tokens)
                accepted += count
        alone, _ = await generate(kinds[2](), prompts[0], sampling, 5)
        await batcher.close()
        return [*outputs, alone], accepted

    outputs, accepted = asyncio.run(run())
    assert outputs == [*expected * 6, expected[0]]
    assert accepted > 0, "no draft was ever accepted: the test would not see a wrong acceptance"


@pytest.mark.parametrize("compile", ["native", "off"])
def test_float32_greedy_equals_transformers_generate(compile: str) -> None:
    module = AutoModelForCausalLM.from_pretrained(real.checkpoint().folder, dtype=torch.float32)
    for prompt in map(real.prompt_tokens, real.PROMPTS[:2]):
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            theirs = module.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, min_new_tokens=30, do_sample=False
            )[0, len(prompt) :]
        runner = real.target("float32", compile)
        tokens = list(prompt)
        real.fill(runner, 1, prompt[:-1])
        ends = set(runner.identity.end_of_sequence_ids)
        for _ in range(30):
            logits = real.logits_of(runner, [verify_row(1, len(tokens) - 1, tokens[-1], (), real.GREEDY)])[0].clone()
            logits[list(ends)] = -torch.inf  # min_new_tokens does the same on their side
            tokens.append(int(logits.argmax()))
        assert tokens[len(prompt) :] == theirs.tolist()


@both_steps
def test_draft_proposals_equal_its_own_plain_decoding(compile: str) -> None:
    """The chained steps of `propose` are the draft's own greedy continuation, also after a rollback."""
    runner = real.draft("float32", compile)
    prompt = real.prompt_tokens(real.PROMPTS[1])
    real.fill(runner, 2, prompt[:-2])
    (first,) = runner.propose([propose_row(2, len(prompt) - 1, tuple(prompt[-2:]), 4, real.GREEDY)])
    assert first.token_ids == reference(runner, prompt, 4)
    shorter = [*prompt, first.token_ids[0], 300]
    (second,) = runner.propose([propose_row(2, len(shorter) - 1, tuple(shorter[-2:]), 3, real.GREEDY)])
    assert second.token_ids == reference(runner, shorter, 3)


def reference(runner, tokens: list[int], count: int) -> tuple[int, ...]:  # type: ignore[no-untyped-def]
    module = runner.model
    out = list(tokens)
    for _ in range(count):
        real.fill(runner, 0, out[:-1])
        logits = module.forward([0], module.tensor([[out[-1]]]), module.tensor([len(out) - 1]))
        out.append(int(logits[0, 0].argmax()))
    return tuple(out[len(tokens) :])


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=1.0, top_k=8),
        SamplingParams(temperature=1.0, top_p=0.8),
    ],
    ids=["temperature", "top_k", "top_p"],
)
def test_seeded_draws_of_the_real_model_follow_its_warped_distribution(params: SamplingParams) -> None:
    runner = real.target("float32")
    prompt = real.prompt_tokens(real.PROMPTS[2])
    real.fill(runner, 0, prompt[:-1])
    logits = real.logits_of(runner, [verify_row(0, len(prompt) - 1, prompt[-1], (), params)])[0].float()
    law = warped(logits, params)
    seeds = range(1500)
    drawn = [
        draw(
            logits.numpy(), SamplingParams(params.temperature, params.top_k, params.top_p, 0.0, seed), len(prompt)
        ).token
        for seed in seeds
    ]
    assert all(law[token] > 0 for token in drawn)
    assert chi_square_p_value(*binned(drawn, law.numpy())) > 1e-4


def binned(drawn: list[int], law: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Counts and probabilities of the likely tokens, all others taken together."""
    counts = np.bincount(drawn, minlength=len(law))
    likely = np.flatnonzero(law * len(drawn) >= 5)
    rest = 1 - law[likely].sum()
    keep = rest * len(drawn) >= 5
    assert keep or counts.sum() - counts[likely].sum() <= 20  # too few to bin, and they are
    return (
        np.append(counts[likely], [counts.sum() - counts[likely].sum()] if keep else []).astype(float),
        np.append(law[likely], [rest] if keep else []),
    )


def warped(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The distribution asked for, written independently of tandem.speculation.draws."""
    scores = logits.double() / params.temperature
    if params.top_k:
        scores[scores < scores.topk(params.top_k).values[-1]] = -torch.inf
    law = scores.softmax(-1)
    if params.top_p < 1:
        order = law.argsort(descending=True, stable=True)
        before = law[order].cumsum(-1) - law[order]
        law[order[before >= params.top_p]] = 0
    return law / law.sum()


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


@pytest.mark.parametrize(("fault", "exact"), [("width", True), ("batch", True), ("column", False)])
def test_certification_sees_a_planted_dependence_on_shape(fault: str, exact: bool) -> None:
    shapes = check_batch_invariance(Perturbed(fault), real.target("float32").limits, (1, 3, 6), (1, 2, 4))  # type: ignore[arg-type]
    assert (shapes.widths, shapes.batches) == ((6,), (4,))
    assert shapes.bit_exact is exact


@pytest.mark.parametrize(("fault", "lengths"), [("none", (128,)), ("length", ())])
def test_a_cache_length_that_changes_bits_is_not_used(fault: str, lengths: tuple[int, ...]) -> None:
    shapes = check_batch_invariance(Perturbed(fault), real.target("float32").limits, (1, 6), (1,), (128,), (16, 64))  # type: ignore[arg-type]
    assert shapes.bit_exact
    assert (shapes.lengths, shapes.prefill_lengths, shapes.chunks) == ((128,), lengths, (16, 64))
