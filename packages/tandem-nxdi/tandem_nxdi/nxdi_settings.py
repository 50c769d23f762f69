"""The user's settings for NxD Inference, without importing it."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from tandem.checkpoints.adapter_files import AdapterChoice

PAIRS = ("both", "fused", "apart")
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
    "is_eagle3": "eagle",
    "tp_degree": "tp_degree",
    "torch_dtype": "dtype",
}


@dataclass(frozen=True, slots=True)
class NxdiSettings:
    """The user's settings.

    `neuron_config`, and `draft_neuron_config` of a fused pair's draft: NeuronConfig fields, passed through.
    `compiled_dir`: None is the user's cache. `artifacts`: a store of compiled folders, S3 too. `eagle`: the draft is an
    EAGLE head. `pair`: a fused_target's models. "both": one graph, greedy, and models apart for requests that need
    logits; "fused": the graph alone; "apart": no graph. `adapters`: compiled into a target.
    """

    tp_degree: int = 1
    neuron_config: Mapping[str, Any] = field(default_factory=dict)
    draft_neuron_config: Mapping[str, Any] = field(default_factory=dict)
    compiled_dir: str | None = None
    artifacts: str | None = None
    eagle: bool = False
    pair: str = "both"
    adapters: tuple[AdapterChoice, ...] = ()

    def __post_init__(self) -> None:
        if self.tp_degree < 1:
            raise ValueError(f"tp_degree: {self.tp_degree} is below 1")
        if self.pair not in PAIRS:
            raise ValueError(f"pair: {self.pair!r} is not one of {', '.join(PAIRS)}")
        if self.eagle and self.pair == "apart":
            raise ValueError("pair: an EAGLE head drafts only in one graph with its target")
        check_names(self.neuron_config)
        check_names(self.draft_neuron_config, "draft_neuron_config")

    @property
    def backend(self) -> str:
        return "nxdi"


FUSED_ONLY = ("on_device_sampling_config", "output_logits", "async_mode", "draft_model_modules_to_not_convert")


QUANTIZING = (
    *("quantized", "quantized_checkpoints_path", "quantization_dtype", "quantization_type", "modules_to_not_convert"),
    *("quantized_mlp_kernel_enabled", "rmsnorm_quantize_kernel_enabled", "activation_quantization_type"),
)
"""A draft keeps these only with quantized weights: its checkpoint is read as it is."""


def apart(settings: NxdiSettings) -> NxdiSettings:
    """Settings of a fused pair's target alone, with logits on the host."""
    fields = {k: v for k, v in settings.neuron_config.items() if k not in (*FUSED_ONLY, *OURS)}
    return replace(settings, neuron_config=fields, draft_neuron_config={}, eagle=False)


def draft_apart(settings: NxdiSettings) -> NxdiSettings:
    """Settings of a fused pair's draft alone: the target's fields, overridden by its own."""
    given, own = settings.neuron_config, settings.draft_neuron_config
    fields = {**apart(settings).neuron_config, **{k: v for k, v in own.items() if k not in (*FUSED_ONLY, *OURS)}}
    if "draft_model_modules_to_not_convert" in given:
        fields["modules_to_not_convert"] = given["draft_model_modules_to_not_convert"]
    if not (fields.get("quantized") and "quantized_checkpoints_path" in own):
        fields = {name: value for name, value in fields.items() if name not in QUANTIZING}
    degree = int(own.get("tp_degree", settings.tp_degree))
    return replace(apart(settings), neuron_config=fields, tp_degree=degree, adapters=())


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


@cache
def names() -> dict[str, Any]:
    """Field names by configuration, of NxDI 0.9.0 (4bcdc54); `elsewhere`: other software's, with Tandem's."""
    found: dict[str, Any] = json.loads(Path(__file__).with_name("fields.json").read_text(encoding="utf-8"))
    return found


def check_names(given: Mapping[str, Any], field: str = "neuron_config") -> None:
    """Raises ValueError, with the nearest name, for a name unknown to NxDI, also in nested configurations."""
    _check(given, [*names()["neuron"], *names()["mixture_of_experts"]], field)
    for name in ("on_device_sampling_config", "kv_quant_config", "lora_config"):
        nested = given.get(name)
        if nested is None:
            continue
        if not isinstance(nested, Mapping):
            raise ValueError(f"{field}: {name} is {nested!r}, not an object of fields")
        _check(nested, names()[name], f"{field}: {name}")


def _check(given: Iterable[str], known: Sequence[str], field: str) -> None:
    for name in given:
        if name not in known and name in names()["elsewhere"]:
            raise ValueError(f"{field}: NxD Inference has no field {name!r}: {names()['elsewhere'][name]}")
        if name not in known:
            cutoff = 0.5 if len(known) < 50 else 0.75  # among many names, one of another thing is always half as alike
            near = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"{field}: NxD Inference has no field {name!r}{hint}")
