"""LoRA adapters in native steps: what PEFT would add, the same bits in any company, and no bit of others changed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tandem.checkpoints.adapter_files import Adapter, LowRank
from tandem.runners.fused_step import fused, fused_step
from tandem.runners.native.native_runner import NativeRunner
from tandem.runners.native.weights import UNQUANTISED, Packing, packing
from tandem.runners.protocol import FusedResult, FusedRow, PrefillRow, RowFailed
from tandem.speculation.types import SamplingParams
from tests.adapters import applied, made_adapter
from tests.daily import daily
from tests.rows import fused_row, propose_row, verify_row
from tests.runners.test_native import CHUNK, GREEDY, SLOTS, module_of, native, sequence
from tests.runners.test_quantised import WIDE

RANKS = {"q_proj": 3, "v_proj": 1, "down_proj": 7, "up_proj": 9}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], Packing]] = {
    "llama, float32": ({}, {}, UNQUANTISED),
    "llama, bfloat16": ({"dtype": torch.bfloat16}, {}, UNQUANTISED),
    "biases": ({"name": "llama with biases, no shared heads, a tied head"}, {}, UNQUANTISED),
    "qwen3, bfloat16": ({"name": "qwen3", "dtype": torch.bfloat16}, {}, UNQUANTISED),
    "heads 48 wide": ({"name": "heads 48 wide, as stories15M has"}, {}, UNQUANTISED),
    "ranks that differ": ({}, {"ranks": RANKS, "rank_pattern": RANKS}, UNQUANTISED),
    "q and v alone": ({}, {"names": ("q_proj", "v_proj")}, UNQUANTISED),
    "down alone, rank 1": ({}, {"names": ("down_proj",), "rank": 1, "r": 1}, UNQUANTISED),
    "int8": (WIDE, {}, packing("int8")),
    "q4, bfloat16": ({**WIDE, "dtype": torch.bfloat16}, {}, packing("q4")),
}
some_cases = pytest.mark.parametrize("case", daily(CASES, 1, 3, 4, 7, 9))


def adapter_of(folder: Path, module: Any, seed: int, **options: Any) -> Adapter:
    fields = {name: options.pop(name) for name in ("r", "rank_pattern") if name in options}
    return made_adapter(folder / str(seed), module, seed, fields=fields, **options)


def loaded(case: str, folder: Path, threads: int = 2) -> tuple[Any, NativeRunner, list[Adapter]]:
    """A module, its runner, and its adapters 1 and 2, the second on other layers than the first."""
    changes, options, packed = CASES[case]
    module = module_of(**changes)
    adapters = [adapter_of(folder, module, 1, **options), adapter_of(folder, module, 2, names=("o_proj", "gate_proj"))]
    runner = native(module, threads=threads, packing=packed)
    for number, adapter in enumerate(adapters, 1):
        runner.put_adapter(number, adapter)
    return module, runner, adapters


def logits(runner: NativeRunner, tokens: Sequence[int], adapter: int, slot: int = 0) -> np.ndarray:
    """Logits [tokens, vocabulary] of a sequence fed at once."""
    found = runner.model.feed([slot], [0], [tokens], 2, [adapter])
    assert found is not None
    return found


@pytest.mark.parametrize("case", [case for case in CASES if not CASES[case][2].quantises])
def test_logits_are_those_of_a_module_with_the_adapter(case: str, tmp_path: Path) -> None:
    module, runner, adapters = loaded(case, tmp_path)
    tokens = sequence(50)
    for number, adapter in enumerate(adapters, 1):
        ours = logits(runner, tokens, number)
        with torch.inference_mode(), applied(module, adapter):
            theirs = module(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float().numpy()
        distance = np.linalg.norm(ours - theirs) / np.linalg.norm(theirs - theirs.mean())
        assert distance < (1e-5 if module.dtype is torch.float32 else 0.06)
        without = logits(runner, tokens, 0)
        assert np.linalg.norm(ours - without) / np.linalg.norm(without - without.mean()) > 0.1, (
            "the adapter does little"
        )


def test_quantised_matrices_add_what_dense_ones_do(tmp_path: Path) -> None:
    """The adapter's own products are not quantised: a model of zeros says what its adapter adds, to the bit."""
    module, tokens = module_of(**WIDE), sequence(9)
    adapter = adapter_of(tmp_path, module, 1)
    for linear in module.model.layers.modules():
        if isinstance(linear, torch.nn.Linear):
            linear.weight.data.zero_()
    dense, packed = native(module), native(module, packing=Packing(layers=packing("int8").layers))
    for runner in (dense, packed):
        runner.put_adapter(1, adapter)
    assert logits(dense, tokens, 1).tobytes() == logits(packed, tokens, 1).tobytes()
    assert logits(dense, tokens, 1).tobytes() != logits(dense, tokens, 0).tobytes()


@some_cases
def test_rows_without_an_adapter_have_the_bits_of_a_runner_without_adapters(case: str, tmp_path: Path) -> None:
    changes, _, packed = CASES[case]
    bare, tokens = native(module_of(**changes), packing=packed), sequence(40)
    _, runner, _ = loaded(case, tmp_path)
    assert logits(runner, tokens, 0).tobytes() == logits(bare, tokens, 0).tobytes()
    beside = runner.model.feed([2, 0, 1], [0, 0, 0], [tokens[25:], tokens, tokens[9:30]], 2, [1, 0, 2])
    assert beside is not None
    assert beside[15:55].tobytes() == logits(bare, tokens, 0).tobytes()


@some_cases
def test_a_row_with_an_adapter_has_the_same_bits_in_any_width_and_company(case: str, tmp_path: Path) -> None:
    _, runner, _ = loaded(case, tmp_path)
    _, single, _ = loaded(case, tmp_path, threads=1)
    tokens, others = sequence(40), sequence(40, seed=1)
    for adapter in (1, 2):
        expected = logits(runner, tokens, adapter)
        assert logits(single, tokens, adapter).tobytes() == expected.tobytes(), "one thread"
        at = 0
        for width in (1, 2, 1, 5, 3, 8, 1, 13, 6):
            parts = [others[: 1 + width % 4], tokens[at : at + width], others[:3]]
            rows = ([2, 1, 0], [0, at, 0], parts, 2, [3 - adapter, adapter, 0])
            found = runner.model.feed(*rows) if width % 3 else runner.model.feed([1], [at], parts[1:2], 2, [adapter])
            assert found is not None
            first = len(parts[0]) if width % 3 else 0
            assert found[first : first + width].tobytes() == expected[at : at + width].tobytes(), f"{width} at {at}"
            at += width
        assert at == len(tokens)


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=0.8, seed=4)], ids=["greedy", "sampled"])
def test_rounds_and_fused_rounds_of_mixed_adapters_say_what_each_says_alone(
    sampling: SamplingParams, tmp_path: Path
) -> None:
    module, runner, _ = loaded("llama, float32", tmp_path)
    draft = native(module, verifies=False)
    prompts = [sequence(CHUNK, seed) for seed in range(SLOTS)]

    def rows(slots: Sequence[int]) -> list[FusedRow]:
        """Prefilled rows, slot s with adapter s."""
        for slot in slots:
            runner.prefill([PrefillRow(slot, 0, tuple(prompts[slot][:-1]), slot)])
            draft.prefill([PrefillRow(slot, 0, tuple(prompts[slot][:-2]))])
        asked = [propose_row(s, CHUNK - 1, tuple(prompts[s][-2:]), 3, sampling) for s in slots]
        return [fused_row(row, logprobs=2, adapter=row.slot) for row in asked]

    def verdicts(results: Any) -> list[Any]:
        return [(each.proposal.token_ids, each.verdict.token_ids, each.verdict.logprobs) for each in results]

    alone = [verdicts(fused_step(runner, draft, rows([slot])))[0] for slot in range(SLOTS)]
    assert verdicts(fused(runner, draft)(rows(range(SLOTS)))) == alone
    assert verdicts(fused_step(runner, draft, rows(range(SLOTS)))) == alone
    assert len({token_ids for _, token_ids, _ in alone}) > 1


def test_a_row_of_an_adapter_that_does_not_exist_fails(tmp_path: Path) -> None:
    module, runner, _ = loaded("llama, float32", tmp_path)
    for step in (
        lambda: runner.prefill([PrefillRow(0, 0, (1, 2), 7)]),
        lambda: runner.verify([verify_row(0, 0, 1, (), GREEDY, adapter=7)]),
        lambda: fused(runner, native(module, verifies=False))(
            [fused_row(propose_row(0, 0, (1,), 1, GREEDY), adapter=7)]
        ),
    ):
        (failed,) = step()
        assert isinstance(failed, RowFailed) and "its adapter does not exist" in str(failed)


@pytest.mark.parametrize(
    ("path", "sizes", "said"),
    [
        ("lm_head", (48, 211), "no matrix lm_head"),
        ("model.layers.2.self_attn.q_proj", (48, 192), "no matrix model.layers.2.self_attn.q_proj"),
        ("model.layers.1.self_attn.k_proj", (48, 192), r"k_proj is \(64, 48\) in the model, the adapter's \(192, 48\)"),
        ("model.layers.1.mlp.down_proj", (48, 48), r"down_proj is \(48, 90\)"),
    ],
)
def test_an_adapter_of_another_model_is_refused_by_the_module(path: str, sizes: tuple[int, int], said: str) -> None:
    part = LowRank(np.zeros((2, sizes[0]), np.float32), np.zeros((sizes[1], 2), np.float32), 1.0)
    with pytest.raises(ValueError, match=said):
        native(module_of()).put_adapter(1, Adapter("red", "r", {path: part}))


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=0.8, seed=4)], ids=["greedy", "sampled"])
def test_a_draft_with_its_own_adapter_agrees_and_changes_no_token(sampling: SamplingParams, tmp_path: Path) -> None:
    """Drafts of the target's weights: right in every row where they have its adapter, else only without one."""
    module, runner, adapters = loaded("llama, float32", tmp_path)
    draft = native(module, verifies=False)
    for number, adapter in enumerate(adapters, 1):
        draft.put_adapter(number, adapter)
    prompts = [sequence(CHUNK, seed) for seed in range(SLOTS)]

    def rows(own: bool) -> list[FusedRow]:
        """Prefilled rows, slot s with adapter s; the last drafts fewer tokens, so that it leaves the batch first."""
        for slot in range(SLOTS):
            runner.prefill([PrefillRow(slot, 0, tuple(prompts[slot][:-1]), slot)])
            draft.prefill([PrefillRow(slot, 0, tuple(prompts[slot][:-2]), slot * own)])
        return [
            fused_row(
                propose_row(s, CHUNK - 1, tuple(prompts[s][-2:]), 3 - (s == 0), sampling, adapter=s * own), adapter=s
            )
            for s in range(SLOTS)
        ]

    def verdicts(results: Any) -> list[Any]:
        return [(each.proposal.token_ids, each.verdict.token_ids) for each in results]

    for own in (True, False):
        together = fused(runner, draft)(rows(own))
        assert verdicts(together) == verdicts(fused_step(runner, draft, rows(own)))
        accepted = [each.verdict.accepted for each in together if isinstance(each, FusedResult)]
        assert accepted == [2, 3, 3] if own else accepted[0] == 2 and sum(accepted) < 8
    (failed,) = draft.propose([propose_row(0, CHUNK - 1, tuple(prompts[0][-2:]), 3, sampling, adapter=3)])
    assert isinstance(failed, RowFailed)
