"""EAGLE-3 heads in C++: the tokens of the module head, the same bits in every step, formats, and who runs what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem.engine.compatibility import able
from tandem.runners.eagle.eagle_runner import EagleRunner
from tandem.runners.eagle.load_head import load_head
from tandem.runners.eagle.module import EagleHead, write_head
from tandem.runners.load_runner import BACKEND, Execution
from tandem.runners.native.head import NativeHead, NativeHeadRunner, load_native_head
from tandem.runners.native.native_runner import NativeRunner
from tandem.runners.native.steps import NativeFeatures
from tandem.runners.native.weights import UNQUANTISED, packing
from tandem.runners.protocol import TAIL, Limits, Proposal, ProposeRow, RunnerIdentity
from tandem.runners.startup import Startup
from tandem.runners.torch.platforms import platform_of
from tandem.speculation.types import Rule, SamplingParams
from tests.daily import daily
from tests.rows import changed, fill, propose_row
from tests.runners.modules import native_of, torch_features, weights_of
from tests.runners.test_eagle import CONFIG, a_head
from tests.runners.tiny import model_folder

GREEDY, SAMPLED = SamplingParams(), SamplingParams(temperature=0.8, top_p=0.95, seed=11)
LIMITS = Limits(4, 96, 4, 16, 258)
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip
HEADS = {
    "as SpecForge makes them": CONFIG,
    "normed residual, biases": replace(CONFIG, norm_before_residual=True, attention_bias=True),
    "llama3 rotary embedding, no shared heads": replace(CONFIG, rope=LLAMA3, num_key_value_heads=4),
    "odd sizes": replace(CONFIG, intermediate_size=90, draft_vocab_size=157, head_dim=48),
    "all tokens": replace(CONFIG, draft_vocab_size=218),
}
TEXT = [60, 200, 61, 150, 62, 63, 90, 64, 220, 65, 66, 130, 67, 68, 110, 69, 170, 70, 71, 72, 180, 73, 74, 100, 75]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("target"), seed=5)


def a_target(
    folder: Path, dtype: torch.dtype = torch.float32, threads: int = 1, weights: str = "auto", limits: Limits = LIMITS
) -> NativeRunner:
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    identity = RunnerIdentity("tiny", "", str(dtype), "cpu", "native")
    return native_of(module, threads, limits, identity, True, None, packing(weights))


def identity_of(target: NativeRunner) -> RunnerIdentity:
    return replace(target.identity, model_name="head")


def native(target: NativeRunner, head: EagleHead, features: NativeFeatures, execution: Execution) -> NativeHeadRunner:
    return load_native_head(weights_of(head), features, features.embedding, target, execution, identity_of(target))


def row(slot: int, tokens: Sequence[int], tail: int = 2, k: int = 4, **changes: Any) -> ProposeRow:
    """A draft after `tokens`, the last `tail` of which the head has not seen."""
    asked = propose_row(slot, len(tokens) - 1, tuple(tokens[-tail:]), k, GREEDY)
    return changed(asked, **changes)


def drafted(runner: Any, rows: Sequence[ProposeRow]) -> list[Proposal]:
    made = [replace(each, seconds=0.0) for each in runner.propose(rows)]
    assert all(isinstance(each, Proposal) for each in made)
    return made


def check_same(got: Sequence[Proposal], wanted: Sequence[Proposal]) -> None:
    """That two heads drafted the same tokens, from distributions that differ by rounding alone."""
    assert [each.token_ids for each in got] == [each.token_ids for each in wanted]
    for a, b in zip(got, wanted, strict=True):
        for p, q in zip(a.distributions, b.distributions, strict=True):
            assert p.token_ids == q.token_ids and p.weights == pytest.approx(q.weights, rel=1e-3)


WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"sampling": SAMPLED},
    {"sampling": SAMPLED, "rule": Rule.REJECTION, "target_vocab_size": 240},
)


@pytest.mark.parametrize("name", HEADS)
def test_in_float32_a_native_head_drafts_the_tokens_of_the_module(folder: Path, name: str) -> None:
    target, head = a_target(folder), a_head(HEADS[name], seed=3)
    features = target.hand_out((1, 1, 2))
    ours = native(target, head, features, Execution(dtype="float32"))
    limits, platform, read = target.limits, platform_of("cpu"), torch_features(features)
    module = EagleRunner(head, read, read.embedding, limits, identity_of(target), platform)
    rows = []
    for slot, (tokens, tail) in enumerate(((TEXT[:1], 1), (TEXT[:2], 2), (TEXT, 2), (TEXT[::-1], TAIL))):
        fill(target, slot, tokens[:-1])
        for runner in (ours, module):
            fill(runner, slot, tokens[:-tail])
        rows.append(row(slot, tokens, tail))
    for changes in WAYS:
        asked = [changed(each, **changes, k=4 - n) for n, each in enumerate(rows)]
        got = drafted(ours, asked)
        check_same(got, drafted(module, asked))
        assert [len(each.token_ids) for each in got] == [4, 3, 2, 1]


FORMATS = {
    "float32": Execution(dtype="float32"),
    "bfloat16": Execution(dtype="bfloat16"),
    "int8": Execution(weights="int8"),
    "q4": Execution(weights="q4", dtype="bfloat16"),
}


@pytest.mark.parametrize("name", daily(FORMATS, 1, 3))
def test_a_heads_logits_have_the_same_bits_in_every_step(folder: Path, name: str) -> None:
    """What the draft is drawn from, under rejection, is made of the logits of all its tokens."""
    rows = [
        row(slot, TEXT[: 9 + 5 * slot], sampling=replace(SAMPLED, seed=slot, top_p=1.0), rule=Rule.REJECTION)
        for slot in range(4)
    ]
    found: list[list[Proposal]] = []
    for threads in (1, 2, 3):
        target = a_target(folder, threads=threads)
        features = target.hand_out((1, 1, 2))
        head = native(target, a_head(seed=3), features, FORMATS[name])
        for chunk in (16, 5):
            for slot in range(4):
                fill(target, slot, TEXT[: 8 + 5 * slot], chunk=chunk)
                fill(head, slot, TEXT[: 7 + 5 * slot], chunk=chunk)
            found.append(drafted(head, rows))
            found.append([drafted(head, [each])[0] for each in rows])
            longer = [replace(each, tail=tuple(TEXT[each.position - 5 : each.position + 1])) for each in rows]
            found.append(drafted(head, longer[::-1])[::-1])
            assert len({len(each.token_ids) for each in found[-1]}) == 1
    assert all(each.distributions for each in found[0])
    assert all(one == found[0] for one in found[1:])


def test_by_default_a_head_is_as_fast_as_its_targets_format_lets_it_be(folder: Path, tmp_path: Path) -> None:
    write_head(tmp_path, a_head().to(torch.bfloat16))
    checkpoint, default = BACKEND.find(str(tmp_path)), Execution()
    fast = "bfloat16" if platform_of("cpu").has_bfloat16() else "float32"
    dense, blocks = a_target(folder), a_target(folder, weights="int8")
    assert load_head(checkpoint, dense, Startup()).identity.dtype == fast
    assert load_head(checkpoint, blocks, Startup(), default).identity.dtype == "int8/float32"
    assert load_head(checkpoint, blocks, Startup(), Execution(dtype="float32")).identity.dtype == "float32"
    assert load_head(checkpoint, dense, Startup(), Execution(weights="q4")).identity.dtype == "q4/float32"
    head = load_head(checkpoint, blocks, Startup())
    assert isinstance(head, NativeHeadRunner) and head.model.threads is blocks.model.threads
    can = able(head)
    assert blocks.fused_with(head) is not None and can.reprocess_accepted and "its target's pages" in can.pages  # type: ignore[operator]
    assert "lookup drafts" in can.adapters and able(blocks).adapters == blocks.put_adapter  # type: ignore[operator]


def test_a_head_that_vectors_do_not_divide_runs_as_module_code(folder: Path, tmp_path: Path) -> None:
    write_head(tmp_path, a_head(replace(CONFIG, head_dim=8)))
    target = a_target(folder)
    head = load_head(BACKEND.find(str(tmp_path)), target, Startup())
    assert isinstance(head, EagleRunner) and head.identity.backend == "torch"
    fill(target, 0, TEXT[:9])
    assert len(drafted(head, [row(0, TEXT[:10], tail=8)])[0].token_ids) == 4


def test_features_that_are_no_numbers_count_as_zeros_and_logits_that_are_none_end_a_draft(folder: Path) -> None:
    target, module = a_target(folder), a_head(seed=3)
    features = target.hand_out((1, 1, 2))
    head = native(target, module, features, Execution(dtype="float32"))
    fill(target, 0, TEXT[:9])
    fill(head, 0, TEXT[:8])
    asked = [row(0, TEXT[:10])]
    features.values[0, 8] = 0.0
    zeros = drafted(head, asked)
    features.values[0, 8, ::2], features.values[0, 8, 1::2] = np.nan, -np.inf
    assert drafted(head, asked) == zeros and len(zeros[0].token_ids) == 4
    module.norm.weight.data[3] = torch.nan
    broken = NativeHead(weights_of(module), "float32", features, target.model.threads, 64, UNQUANTISED)
    ended = NativeHeadRunner(broken, target.limits, head.identity)
    assert drafted(ended, asked)[0].token_ids == ()
