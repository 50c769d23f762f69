"""Finds what NxD Inference quantises; refuses weights that would fail to load hours later, after compiling.

A fused graph converts draft and target once the target quantises anything, each by its own `modules_to_not_convert`
(model_wrapper.py, load_module): a linear module is kept if an entry is part of its name (NxD's quantize.py), else needs
a scale.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tandem.checkpoints.locate import CheckpointError
from tandem.checkpoints.tensors import INDEX, SAFETENSORS, Tensors
from tandem_nxdi.checkpoint import ModelFacts
from tandem_nxdi.shapes import Build

QUANTISING = ("quantized", "quantized_mlp_kernel_enabled", "activation_quantization_type")
"""Each of these makes NxDI convert linear modules (config.py, is_mlp_quantized)."""
_WITH_THEM = ("quantized_checkpoints_path", "rmsnorm_quantize_kernel_enabled")
FP8_VARIABLES = {"XLA_HANDLE_SPECIAL_SCALAR": "1", "UNSAFE_FP8FNCAST": "1"}
"""inference_demo.py's for FP8."""
_GROUP = re.compile(r"layers\.\d+\.\w+")
_SCALES = (".scale", ".weight_scale")


def quantises(fields: Mapping[str, Any]) -> bool:
    """Whether NxDI converts modules with these fields of NeuronConfig."""
    return any(fields.get(name) for name in QUANTISING)


def fp8_environment(fields: Mapping[str, Any]) -> dict[str, str]:
    """FP8's environment variables: as set already, else as in NxDI's program.

    With a quantised MLP kernel or activations, NxDI sets the dtype f8e4m3 itself (config.py).
    """
    eight = fields.get("quantized") and str(fields.get("quantization_dtype", "int8")).startswith("f8")
    if not (eight or quantises({**fields, "quantized": False}) or fields.get("kv_cache_quant")):
        return {}
    return {name: os.environ.get(name, value) for name, value in FP8_VARIABLES.items()}


def with_draft_kept(build: Build, draft: ModelFacts) -> Build:
    """A fused build whose draft keeps its weights, unless its own list decides.

    Raises CheckpointError if the list leaves unscaled modules to convert.
    """
    if build.draft is None or not quantises(build.neuron):
        return build
    tensors = Tensors(Path(draft.folder))
    kept = build.draft.get("modules_to_not_convert")
    if kept is None:
        own = {name: value for name, value in build.draft.items() if name not in (*QUANTISING, *_WITH_THEM)}
        return replace(build, draft=own | {"modules_to_not_convert": groups(linear_modules(tensors))})
    refuse_unscaled(draft.folder, tensors, kept, "draft_model_modules_to_not_convert")
    return build


def check_target(build: Build, target: ModelFacts) -> None:
    """Raises CheckpointError if NxDI would convert a target that cannot be loaded. Skips weights that it quantises."""
    if not quantises(build.neuron):
        return
    path = build.neuron["quantized_checkpoints_path"] if build.neuron.get("quantized") else target.folder
    folder = Path(str(path))
    if any((folder / name).is_file() for name in (SAFETENSORS, SAFETENSORS + INDEX)):
        kept = build.neuron.get("modules_to_not_convert") or ()
        refuse_unscaled(str(path), Tensors(folder), kept, "modules_to_not_convert")


def refuse_unscaled(folder: str, tensors: Tensors, kept: Sequence[str], field: str) -> None:
    """Raises CheckpointError for the first modules converted without scales, or kept with them."""
    lacking, unused = [], []
    for module in linear_modules(tensors):
        scaled = any(f"{stored}{end}" in tensors.files for stored in (module, f"model.{module}") for end in _SCALES)
        listed = any(entry in module for entry in kept)
        if not listed and not scaled:
            lacking.append(module)
        if listed and scaled:
            unused.append(module)
    if lacking:
        raise CheckpointError(
            f"{folder}: NxD Inference would quantise {_some(lacking)}, whose weights have no scales here, and fail "
            f"after compiling; add them to {field}"
        )
    if unused:
        raise CheckpointError(f"{folder}: {_some(unused)} have scales, which {field} would leave unread")


def linear_modules(tensors: Tensors) -> Iterator[str]:
    """NxDI's names of a checkpoint's modules with a matrix, but not the embedding."""
    for name in sorted(tensors.files):
        module = name.removeprefix("model.").removesuffix(".weight")
        if name.endswith(".weight") and module != "embed_tokens" and len(tensors.shape(name)) > 1:
            yield module


def groups(modules: Iterable[str]) -> list[str]:
    """A list that keeps these modules, by layer and part: NxDI looks up attention and MLPs by these names."""
    found = {match[0] if (match := _GROUP.match(module)) else module for module in modules}
    return sorted(found | {"lm_head"})


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
