"""LoRA adapters for tests: made up, written as PEFT writes them, and applied to a module as PEFT applies them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tandem.checkpoints.adapter_files import Adapter, AdapterChoice, LowRank, read_adapter

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
EVERY = (*ATTENTION, *MLP)
CONFIG = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "bias": "none", "use_dora": False}


def linears(module: Any, names: Sequence[str] = EVERY) -> dict[str, Any]:
    """The linear layers of a module that have one of these names, by their path."""
    return {path: each for path, each in module.named_modules() if path.rpartition(".")[2] in names}


def lora_tensors(
    module: Any, seed: int, rank: int = 4, names: Sequence[str] = EVERY, ranks: Mapping[str, int] | None = None
) -> dict[str, Tensor]:
    """An adapter's tensors, strong enough to change what a model says."""
    chance, tensors = torch.Generator().manual_seed(seed), {}
    for path, linear in linears(module, names).items():
        r = (ranks or {}).get(path.rpartition(".")[2], rank)
        tensors[f"base_model.model.{path}.lora_A.weight"] = torch.randn(r, linear.in_features, generator=chance) * 0.1
        tensors[f"base_model.model.{path}.lora_B.weight"] = torch.randn(linear.out_features, r, generator=chance) * 0.1
    return tensors


def write_adapter(folder: Path, tensors: Mapping[str, Tensor], **fields: Any) -> Path:
    """A PEFT folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **fields}))
    save_file(dict(tensors), folder / "adapter_model.safetensors")
    return folder


def made_adapter(
    folder: Path, module: Any, seed: int, fields: Mapping[str, Any] | None = None, **options: Any
) -> Adapter:
    """An adapter for a module, written with these fields and read again."""
    written = write_adapter(folder, lora_tensors(module, seed, **options), **(fields or {}))
    return read_adapter(AdapterChoice(f"a{seed}", str(written)))


@contextlib.contextmanager
def applied(module: Any, adapter: Adapter) -> Iterator[None]:
    """Meanwhile the module's linear layers add what PEFT's would: an oracle by value."""
    hooks = [
        module.get_submodule(path).register_forward_hook(lambda _, x, out, part=part: out + _delta(part, x[0]).to(out))
        for path, part in adapter.parts.items()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _delta(part: LowRank, x: Tensor) -> Tensor:
    down, up = torch.from_numpy(part.down), torch.from_numpy(part.up)
    return (x.float() @ down.T) @ up.T * part.scale
