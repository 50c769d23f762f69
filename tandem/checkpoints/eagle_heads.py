"""EAGLE heads, as published and as NxD Inference loads them.

Published EAGLE-1 heads lack an output matrix, EAGLE-3's an embedding and part of the vocabulary; NxD Inference needs
both whole (`--role convert --convert eagle`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.checkpoints.head_config import (
    EMBEDDING,
    FC,
    LAYERS,
    MAPS,
    OUTPUT,
    HeadConfig,
    default_layers,
    head_shapes,
    is_head,
    our_name,
    read_head_config,
)
from tandem.checkpoints.json_files import read_object
from tandem.checkpoints.locate import CheckpointError
from tandem.checkpoints.tensors import Tensors

if TYPE_CHECKING:
    from torch import Tensor

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
    if missing := sorted(plain(name) for name in required if name not in names):
        raise CheckpointError(f"{folder}: the head lacks {', '.join(missing[:3])}")
    known = required | optional
    if unknown := sorted(plain(name) for name in names if name not in known and not name.endswith("_proj.bias")):
        raise CheckpointError(f"{folder}: the head has {', '.join(unknown[:3])}, which EAGLE-{kind} heads do not have")
    for name in sorted(set(names) & set(known)):
        found = tensors.shape(names[name])
        if found != known[name]:
            shape = list(known[name])
            raise CheckpointError(f"{folder}: {plain(name)} is {list(found)}, not {shape} as config.json has it")
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
