"""LoRA adapters in module code: what PEFT would add, and the same bits at every width, in every row, in any company."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tandem.checkpoints.adapter_files import Adapter, LowRank
from tandem.runners.protocol import Proposal, VerifyRow
from tandem.runners.torch.slot_model import TorchModel
from tandem.runners.torch.torch_runner import TorchRunner
from tandem.speculation.types import Verdict
from tests.adapters import applied, made_adapter
from tests.rows import fill, propose_row, verify_row
from tests.runners.compiled import CACHE, GREEDY, LIMITS, PROMPT, eager, identity, module

NAMES = ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj")
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def runner_of(dtype: torch.dtype, verifies: bool = True) -> TorchRunner:
    model = TorchModel(copy.deepcopy(module("llama", dtype, False)), *CACHE)
    runner = TorchRunner(model, LIMITS, identity(dtype), verifies)
    runner.warm_up()
    return runner


def adapted(folder: Path, dtype: torch.dtype) -> tuple[TorchRunner, list[Adapter]]:
    """A runner with adapters 1 and 2, made before its linear layers are packed."""
    plain, runner = module("llama", dtype, False), runner_of(dtype)
    adapters = [made_adapter(folder / str(seed), plain, seed, names=NAMES[seed:]) for seed in (1, 2)]
    for number, adapter in enumerate(adapters, 1):
        runner.put_adapter(number, adapter)
    return runner, adapters


def rows_of(slots: Sequence[int], adapters: Sequence[int], width: int) -> list[VerifyRow]:
    draft = PROMPT[-3:-1][: width - 1]
    return [
        verify_row(s, len(PROMPT) - 4, PROMPT[-4], draft, GREEDY, adapter=a)
        for s, a in zip(slots, adapters, strict=True)
    ]


def bits(logits: Any, row: int) -> bytes:
    """The logits behind a row's first token."""
    return logits[row, 0].contiguous().view(torch.uint8).numpy().tobytes()


@every_dtype
def test_logits_are_those_of_a_module_with_the_adapter(dtype: torch.dtype, tmp_path: Path) -> None:
    runner, adapters = adapted(tmp_path, dtype)
    plain = copy.deepcopy(module("llama", dtype, False))
    plain.set_attn_implementation("eager")
    without = plain(input_ids=torch.tensor([PROMPT[:-3]])).logits[0, -1].float()
    for number, adapter in enumerate(adapters, 1):
        fill(runner, 0, PROMPT[:-4], adapter=number)
        ours = runner.verify_logits(rows_of([0], [number], 1))[0, 0].float()
        with applied(plain, adapter):
            theirs = plain(input_ids=torch.tensor([PROMPT[:-3]])).logits[0, -1].float()
        assert float((ours - theirs).norm() / (theirs - theirs.mean()).norm()) < (
            1e-5 if dtype == torch.float32 else 0.05
        )
        assert float((without - theirs).norm() / (theirs - theirs.mean()).norm()) > 0.1, "the adapter does little"


@every_dtype
def test_rows_have_the_same_bits_alone_and_beside_any_others_at_every_width(dtype: torch.dtype, tmp_path: Path) -> None:
    (runner, _), bare, alone = adapted(tmp_path, dtype), eager(dtype=dtype), {}
    fill(bare, 0, PROMPT[:-4], adapter=0)
    plainly = bits(bare.verify_logits(rows_of([0], [0], 1)), 0)
    for adapter in (0, 1, 2):
        fill(runner, 1, PROMPT[:-4], adapter=adapter)
        alone[adapter] = bits(runner.verify_logits(rows_of([1], [adapter], 1)), 0)
        assert bits(runner.verify_logits(rows_of([1], [adapter], 3)), 0) == alone[adapter]
    assert alone[0] == plainly, "a row without an adapter is changed"
    assert len(set(alone.values())) == 3
    for pair in ((1, 2), (2, 0), (0, 1), (1, 1)):
        for slot, adapter in enumerate(pair):
            fill(runner, slot, PROMPT[:-4], adapter=adapter)
        for width in (1, 2, 3):
            logits = runner.verify_logits(rows_of([0, 1], pair, width))
            assert [bits(logits, 0), bits(logits, 1)] == [alone[adapter] for adapter in pair]


def test_what_does_not_fit_the_model_is_refused(tmp_path: Path) -> None:
    runner, _ = adapted(tmp_path, torch.float32)
    for path, said in (("lm_head", "lm_head"), ("model.layers.9.self_attn.q_proj", "layers.9")):
        part = LowRank(np.zeros((1, 48), np.float32), np.zeros((48, 1), np.float32), 1.0)
        with pytest.raises(ValueError, match=said):
            runner.put_adapter(3, Adapter("red", "r", {path: part}))
    with pytest.raises(ValueError, match=r"q_proj is \(48, 48\) in the model, the adapter's \(40, 48\)"):
        wrong = LowRank(np.zeros((1, 48), np.float32), np.zeros((40, 1), np.float32), 1.0)
        runner.put_adapter(3, Adapter("red", "r", {"model.layers.0.self_attn.q_proj": wrong}))
    with pytest.raises(KeyError):
        fill(runner, 0, PROMPT, adapter=3)


def test_drafts_propose_with_their_adapter_beside_rows_of_others(tmp_path: Path) -> None:
    """A draft of the same weights and adapter says what the target with the adapter does."""
    (target, adapters), draft = adapted(tmp_path, torch.float32), runner_of(torch.float32, verifies=False)
    for number, adapter in enumerate(adapters, 1):
        draft.put_adapter(number, adapter)
    said = set()
    for pair in ((1, 2), (0, 1)):
        rows = [propose_row(s, len(PROMPT) - 1, PROMPT[-2:], 3, GREEDY, adapter=a) for s, a in enumerate(pair)]
        for row in rows:
            fill(target, row.slot, PROMPT[:-1], adapter=row.adapter)
            fill(draft, row.slot, PROMPT[:-2], adapter=row.adapter)
        together = [each.token_ids for each in draft.propose(rows) if isinstance(each, Proposal)]
        assert len(together) == 2
        for row, tokens in zip(rows, together, strict=True):
            verdict = verify_row(row.slot, len(PROMPT) - 1, PROMPT[-1], tokens, GREEDY, adapter=row.adapter)
            (judged,) = target.verify([verdict])
            assert isinstance(judged, Verdict) and judged.accepted == 3
            fill(draft, row.slot, PROMPT[:-2], adapter=row.adapter)
            (alone,) = draft.propose([row])
            assert isinstance(alone, Proposal) and alone.token_ids == tokens
            said.add(tokens)
    assert len(said) == 3
