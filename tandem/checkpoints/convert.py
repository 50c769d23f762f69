"""Converts checkpoints for NxD Inference: `--role convert`.

Neuron's E4M3 reaches 240, OCP's 448: weights are divided by 448/240, scales multiplied, as in AWS's guide, but rounded
once.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.checkpoints.head_config import (
    EMBEDDING,
    FC,
    LAYERS,
    MAPS,
    OUTPUT,
    HeadConfig,
    check_tensors,
    default_layers,
    head_fields,
    head_shapes,
    is_head,
    our_name,
    read_head_config,
)
from tandem.checkpoints.json_files import read_object
from tandem.checkpoints.locate import CheckpointError
from tandem.checkpoints.tensors import WEIGHT_FILES, Tensors, shards_of, write_tensors

if TYPE_CHECKING:
    from torch import Tensor

    Converted = tuple[Mapping[str, int], Callable[[str], Tensor], dict[str, Any], list[str]]
    """Sizes and tensors of a checkpoint, changed fields of its config.json, lines to print."""

INPUT_NORM = "layers.0.input_layernorm.weight"
_LEAST_LAYERS = 7  # of a target: with fewer, two of the three layers that NxD Inference reads are the same


def is_eagle1(folder: Path) -> bool:
    try:
        return "fc_bias" in read_object(folder / "config.json")
    except (OSError, ValueError):
        return False


def plain(name: str) -> str:
    """Returns Llama's name of a tensor."""
    return our_name(name).replace("midlayer.", "layers.0.", 1)


def check_head(folder: Path, tensors: Tensors) -> HeadConfig:
    """Checks a head's tensor names and shapes; returns its sizes. Raises CheckpointError."""
    kind = 3 if is_head(folder) else 1
    names = {our_name(name): name for name in tensors.files}
    if FC not in names:
        raise CheckpointError(f"{folder}: no {FC}: not an EAGLE-{kind} head")
    head = read_head_config(folder, eagle1=kind == 1)
    required, optional = head_shapes(head, eagle1=kind == 1)
    if kind == 3 and head.draft_vocab_size != head.vocab_size:
        required["d2t"] = optional["d2t"]
    shapes = {own: tensors.shape(name) for own, name in names.items() if kind == 3 or not own.endswith("_proj.bias")}
    check_tensors(folder, required, optional, shapes, kind)
    return head


def check_taken(folder: Path, head: HeadConfig, target: Mapping[str, Any]) -> None:
    """Raises CheckpointError unless NxD Inference can run this EAGLE-3 head beside the target.

    It reads the states after layers 2, n // 2 and n - 3 of n, and adds attention's output to the feature before its
    norm (model_base.py, modeling_llama.py).
    """
    count = target.get("num_hidden_layers")
    if type(count) is not int or count < _LEAST_LAYERS:
        raise CheckpointError(
            f"num_hidden_layers: the target has {count!r:.60}; NxD Inference reads three layers for an EAGLE-3 head, of"
            f" {_LEAST_LAYERS} or more"
        )
    read = default_layers(count)
    if head.layers not in (None, read):
        raise CheckpointError(
            f"{folder}: {LAYERS}: the head reads the target after layers {list(head.layers or ())}, and NxD Inference"
            f" hands out those after {list(read)} alone; train one with --layers {','.join(map(str, read))}"
        )
    if head.norm_before_residual:
        raise CheckpointError(f"{folder}: norm_before_residual: true: NxD Inference computes false; train one so")
    if head.target_hidden_size != head.hidden_size:
        raise CheckpointError(
            f"{folder}: target_hidden_size: {head.target_hidden_size} is not the head's {head.hidden_size}, and NxD"
            " Inference has one size for both"
        )


def check_completed(folder: Path, target: Mapping[str, Any], normed_inputs: bool) -> None:
    """Raises CheckpointError unless NxD Inference can load the head beside the target."""
    tensors = Tensors(folder)
    head, eagle3 = check_head(folder, tensors), is_head(folder)
    names = {name.removeprefix("model.") for name in tensors.files}
    if eagle3:
        check_taken(folder, head, target)
        if head.draft_vocab_size != head.vocab_size or names & set(MAPS):
            raise CheckpointError(
                f"{folder}: d2t: the head drafts from {head.draft_vocab_size} of {head.vocab_size} tokens, and NxD"
                " Inference maps none; --role convert --convert eagle writes it for all"
            )
        if any(plain(name) != name for name in names):
            raise CheckpointError(f"{folder}: midlayer: not Llama's name; --role convert --convert eagle writes that")
    for table in (OUTPUT, EMBEDDING):
        if table not in names:
            raise CheckpointError(f"{folder}: no {table}; --role convert --convert eagle takes it from the target")
    for field, own in (("hidden_size", head.hidden_size), ("vocab_size", head.vocab_size)):
        if (wanted := target.get(field)) is not None and own != wanted:
            raise CheckpointError(f"{folder}: {field}: {own}, and the target's is {wanted}")
    if not eagle3 and normed_inputs != (INPUT_NORM in names):
        has, flag = ("has no", "false") if normed_inputs else ("has", "true")
        raise CheckpointError(
            f"{folder}: the head {has} {INPUT_NORM}: set enable_eagle_draft_input_norm to {flag} in --neuron_config"
        )


def widened(folder: Path, matrix: Tensor, offsets: Tensor, vocabulary: int) -> Tensor:
    # Tokens without a row get the mean row: their logit, the mean, is never the largest.
    import torch

    ids = offsets.long() + torch.arange(len(offsets))
    if int(ids.min()) < 0 or int(ids.max()) >= vocabulary or len(ids.unique()) != len(ids):
        raise CheckpointError(f"{folder}: d2t does not name {len(ids)} tokens of {vocabulary}")
    whole = matrix.float().mean(0).to(matrix.dtype).repeat(vocabulary, 1)
    whole[ids] = matrix
    return whole


CONVERSIONS = ("fp8", "eagle", "safetensors")
OCP_MOST, NEURON_MOST = 448.0, 240.0
SCALE = "_scale"
EMBEDDINGS = (f"model.{EMBEDDING}", EMBEDDING)


def run_convert(source: Path, output: Path, to: str, target: Path | None = None, shard_bytes: int = 5 * 10**9) -> int:
    """Converts a model's or head's folder; `target`: the head's target. Raises ValueError, one line."""
    if to not in CONVERSIONS:
        raise ValueError(f"convert: {to!r} is not one of {', '.join(CONVERSIONS)}")
    if shard_bytes < 1:
        raise ValueError("shard_gb: is not above 0")
    for folder in (source, target):
        if folder is not None and not (folder / "config.json").is_file():
            raise ValueError(f"{folder}: not a model folder with a config.json")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"output: {output} is not an empty folder")
    tensors = Tensors(source)
    made: Converted = tensors.sizes(), tensors.__getitem__, {}, []
    if to != "safetensors":
        made = _fp8(tensors) if to == "fp8" else _eagle(tensors, target)
    sizes, load, changed, notes = made
    # config.json is last: without it a folder is no model.
    output.mkdir(parents=True, exist_ok=True)
    files = write_tensors(output, shards_of(sizes, shard_bytes), load)
    for file in sorted(source.iterdir()):
        if file.is_file() and file.name != "config.json" and not any(fnmatch(file.name, one) for one in WEIGHT_FILES):
            shutil.copyfile(file, output / file.name)
    text = json.dumps(json.loads((source / "config.json").read_text(encoding="utf-8")) | changed, indent=2)
    (output / "config.json").write_text(text + "\n", encoding="utf-8")
    print(f"{len(sizes)} tensors in {len(files)} {'file' if len(files) == 1 else 'files'}: {output}")
    for line in notes:
        print(line)
    return 0


def _fp8(tensors: Tensors) -> Converted:
    import torch

    scaled = {name.removesuffix(SCALE) for name in tensors.files if name.endswith(f".weight{SCALE}")}
    if not scaled:
        raise CheckpointError(f"{tensors.folder}: no weight has a scale beside it (NAME.weight{SCALE}): not FP8")
    first = next(name for name in tensors.files if name in scaled)
    if float(tensors[first].to(torch.float32).abs().max()) <= NEURON_MOST:
        raise CheckpointError(f"{tensors.folder}: {first} is within ±{NEURON_MOST:g} already; it looks rescaled")
    factor = OCP_MOST / NEURON_MOST

    def load(name: str) -> Tensor:
        tensor = tensors[name]
        if name.endswith(SCALE) and name.removesuffix(SCALE) in scaled:
            return tensor.to(torch.float32) * factor
        if name not in scaled:
            if tensor.dtype == torch.float8_e4m3fn:
                raise CheckpointError(f"{tensors.folder}: {name} is FP8 without a scale of its own ({name}{SCALE})")
            return tensor
        if tensor.dtype != torch.float8_e4m3fn:
            raise CheckpointError(f"{tensors.folder}: {name} has a scale, and is {tensor.dtype}, not float8_e4m3fn")
        return (tensor.to(torch.float32) / factor).to(torch.float8_e4m3fn)

    return tensors.sizes(), load, {}, [f"{len(scaled)} FP8 weights rescaled"]


def _eagle(tensors: Tensors, target_folder: Path | None) -> Converted:
    if target_folder is None:
        raise ValueError("target_model: name the target whose output matrix the head gets")
    head, eagle3 = check_head(tensors.folder, tensors), is_head(tensors.folder)
    names = {plain(name): name for name in tensors.files if plain(name) not in MAPS}
    if eagle3:
        settings = read_object(target_folder / "config.json")
        check_taken(tensors.folder, head, settings.get("text_config") or settings)
    elif OUTPUT in names:
        raise CheckpointError(f"{tensors.folder}: has {OUTPUT} already")
    target = Tensors(target_folder)
    grafted = {} if OUTPUT in names else {OUTPUT: _first(target, (OUTPUT, *EMBEDDINGS))}  # tied: the embeddings alone
    grafted |= {} if EMBEDDING in names else {EMBEDDING: _first(target, EMBEDDINGS)}
    sides = (("vocab_size", head.vocab_size, "rows"), ("hidden_size", head.hidden_size, "columns"))
    for name, source in grafted.items():
        for (field, size, side), there in zip(sides, target.shape(source), strict=True):
            if size != there:
                raise CheckpointError(f"{tensors.folder}: {field}: {size}, and the target's {name} has {there} {side}")
    fc, widens = tensors[names[FC]], head.draft_vocab_size != head.vocab_size

    def load(name: str) -> Tensor:
        if name in grafted:
            return target[grafted[name]].to(fc.dtype)
        tensor = tensors[names[name]]
        return widened(tensors.folder, tensor, tensors["d2t"], head.vocab_size) if widens and name == OUTPUT else tensor

    theirs = tensors.sizes()
    sizes = {name: theirs[own] for name, own in names.items()}
    sizes |= {name: math.prod(target.shape(source)) * fc.element_size() for name, source in grafted.items()}
    notes = (
        [f"from {target_folder}: {', '.join(f'{n} ({source})' for n, source in grafted.items())}"] if grafted else []
    )
    if widens:
        sizes[OUTPUT] = sizes[OUTPUT] // head.draft_vocab_size * head.vocab_size
        notes.append(f"{OUTPUT}: {head.draft_vocab_size} tokens as they were, {head.vocab_size} in all")
    if eagle3:
        dtype = str(fc.dtype).removeprefix("torch.")
        own = head_fields(replace(head, draft_vocab_size=head.vocab_size), dtype)
    else:
        own = {"num_hidden_layers": 1, "tie_word_embeddings": False, "fc_bias": "fc.bias" in names}
        if INPUT_NORM in names:
            notes.append("it norms its inputs: serve it with enable_eagle_draft_input_norm true in --neuron_config")
    return sizes, load, own, notes


def _first(tensors: Tensors, names: tuple[str, ...]) -> str:
    found = next((name for name in names if name in tensors.files), None)
    if found is None:
        raise CheckpointError(f"{tensors.folder}: has none of {', '.join(names)}")
    return found
