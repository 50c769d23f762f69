"""Reads and checks the user's settings for NxD Inference, without importing it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tandem.runners.nxdi.fields import check_names

# Fields that Tandem's own flags determine, and those flags.
OURS = {
    "batch_size": "batch",
    "max_batch_size": "batch",
    "tkg_batch_size": "batch",
    "spec_batch_size": "batch",
    "kv_cache_batch_size": "batch",
    "ctx_batch_size": "backend",
    "is_continuous_batching": "batch",
    "speculation_length": "speculation_length",
    "enable_fused_speculation": "role",
    "enable_eagle_speculation": "eagle",
    "is_eagle_draft": "eagle",
    "tp_degree": "tp_degree",
    "torch_dtype": "dtype",
}


@dataclass(frozen=True, slots=True)
class NxdiSettings:
    """The user's settings for NxD Inference.

    `neuron_config`, and `draft_neuron_config` for the draft of a fused pair: NeuronConfig fields, passed through.
    `compiled_dir`: folder of compiled models; None is the user's cache. `eagle`: the draft is an EAGLE1 head.
    """

    tp_degree: int = 1
    neuron_config: Mapping[str, Any] = field(default_factory=dict)
    draft_neuron_config: Mapping[str, Any] = field(default_factory=dict)
    compiled_dir: str | None = None
    eagle: bool = False

    def __post_init__(self) -> None:
        if self.tp_degree < 1:
            raise ValueError(f"tp_degree: {self.tp_degree} is below 1")
        check_names(self.neuron_config)
        check_names(self.draft_neuron_config, "draft_neuron_config")

    @property
    def backend(self) -> str:
        """The backend that takes these settings."""
        return "nxdi"


def read_neuron_config(given: str | None, name: str = "neuron_config") -> dict[str, Any]:
    """Reads a JSON object, inline or from a file. Raises ValueError, one line."""
    if given is None:
        return {}
    text, source = given, "the value"
    if not given.lstrip().startswith("{"):
        path = Path(given).expanduser()
        try:
            text, source = path.read_text(encoding="utf-8"), str(path)
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"{name}: {given!r} is neither a JSON object nor a file that can be read: {error}"
            ) from None
    try:
        read = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{name}: {source} is not valid JSON: {error}") from None
    if not isinstance(read, dict):
        raise ValueError(f"{name}: {source} holds {type(read).__name__}, not an object of NeuronConfig fields")
    return read
