"""What PEFT itself computes with an adapter that it saved, where PEFT is installed (it is no dependency of ours)."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tandem.checkpoints.adapter_files import AdapterChoice, read_adapter
from tests.runners.test_native import module_of, native, sequence

peft = pytest.importorskip("peft")
PATTERNS = {
    "rank_pattern": {"q_proj": 2, r"layers\.1\.self_attn\.v_proj": 7},
    "alpha_pattern": {"down_proj": 3, r"model\.layers\.0\.self_attn\.q_proj": 5},
}


@pytest.mark.parametrize(
    "fields",
    [{}, {"use_rslora": True}, PATTERNS, {"target_modules": "all-linear"}],
    ids=["q v down", "rs", "by", "all"],
)
def test_native_logits_are_those_of_peft(fields: dict[str, Any], tmp_path: Path) -> None:
    base, tokens = module_of("qwen3"), sequence(40)
    chosen = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"], "task_type": "CAUSAL_LM"}
    model = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(**chosen | fields))
    torch.manual_seed(5)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(tmp_path)
    runner = native(base)
    runner.put_adapter(1, read_adapter(AdapterChoice("a", str(tmp_path))))
    ours = runner.model.feed([0], [0], [tokens], 2, [1])
    with torch.inference_mode():
        again = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path)
        theirs = again(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].numpy()
    assert ours is not None
    assert np.linalg.norm(ours - theirs) / np.linalg.norm(theirs - theirs.mean()) < 1e-5
