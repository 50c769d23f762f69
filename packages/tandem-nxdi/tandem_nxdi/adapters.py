"""LoRA adapters of an NxDI target: compiled in at start, chosen by row.

A line keeps its prompt's adapter: context encoding copies the matrices to the line, and decode calls read them there
(modules/lora_serving). With enable_base_model_only number 0 is none; adapters count from 1 by lora_ckpt_paths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.checkpoints.adapter_files import Adapter, AdapterChoice, read_adapter, read_config

_OURS = (
    *("batch_size", "dynamic_multi_lora", "enable_base_model_only", "lora_ckpt_json", "lora_ckpt_paths"),
    *("lora_ckpt_paths_cpu", "max_cpu_loras", "max_loras", "target_modules"),
)


def read_adapters(choices: Sequence[AdapterChoice]) -> tuple[Adapter, ...]:
    """Reads adapters for NxDI. Raises CheckpointError or ValueError that names the adapter."""
    for choice in choices:
        if Path(choice.source).is_dir() and read_config(Path(choice.source)).alphas:
            raise ValueError(
                f"adapters: {choice.name}: alpha_pattern is not served: NxD Inference reads lora_alpha alone"
            )
    return tuple(read_adapter(choice) for choice in choices)


def lora_config(
    given: Mapping[str, Any], choices: Sequence[AdapterChoice], adapters: Sequence[Adapter], slots: int
) -> dict[str, Any]:
    """NeuronConfig's lora_config for `adapters`, read from `choices`; `given`: the user's fields.

    Without adapters: the user's own fields, with memory for the matrices of `slots` lines.
    """
    if not adapters:
        return {**given, "batch_size": given.get("batch_size", slots)} if given else {}
    for name in _OURS:
        if name in given:
            raise ValueError(f"neuron_config: lora_config has {name}, which --adapters determines; leave it out")
    parts = [(path, part.rank) for adapter in adapters for path, part in adapter.parts.items()]
    most = max(rank for _, rank in parts)
    if given.get("max_lora_rank", most) < most:
        raise ValueError(f"neuron_config: max_lora_rank {given['max_lora_rank']} is below {most}, an adapter's")
    return {
        "max_lora_rank": most,
        **given,
        "max_loras": len(adapters),
        "enable_base_model_only": True,
        "batch_size": slots,
        "lora_ckpt_paths": {choice.name: str(Path(choice.source).absolute()) for choice in choices},
        "target_modules": sorted({path.rpartition(".")[2] for path, _ in parts}),
    }


class NxdiAdapters:
    """A target's compiled adapters by revision. Requests refer to them by the numbers of `put`."""

    def __init__(self, built: Mapping[str, str] | None = None) -> None:
        self._built = dict(built or {})
        self._places: dict[int, int] = {0: 0}

    @property
    def there(self) -> bool:
        """Whether the target has adapters."""
        return bool(self._built)

    def put(self, number: int, adapter: Adapter) -> None:
        """PutAdapter for a compiled adapter. Raises ValueError for any other."""
        if self._built.get(adapter.name) != adapter.revision:
            raise ValueError(
                f"adapters: {adapter.name}: NxD Inference holds the adapters that it was started with: "
                f"{', '.join(self._built)}"
            )
        self._places[number] = list(self._built).index(adapter.name) + 1

    def place(self, number: int) -> int:
        """NxDI's number of the adapter. Raises KeyError."""
        return self._places[number]
