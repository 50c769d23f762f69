"""Reads and writes head folders as vLLM and SGLang do: config.json and model.safetensors."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from tandem.checkpoints.head_config import write_head_config
from tandem.checkpoints.head_weights import EMBEDDING, LAYER, HeadWeights, read_head_weights
from tandem.checkpoints.locate import CheckpointError, first_line
from tandem.checkpoints.tensors import SAFETENSORS, save_tensors
from tandem.runners.eagle.module import EagleHead
from tandem.runners.torch.from_tensors import tensor_of


def read_head(folder: Path) -> tuple[EagleHead, Tensor | None]:
    weights, embedding = read_head_weights(folder)
    return head_module(folder, weights), None if embedding is None else tensor_of(embedding)


def head_module(folder: Path, weights: HeadWeights) -> EagleHead:
    """Raises CheckpointError."""
    try:
        made = EagleHead(weights.config)
    except Exception as error:  # of transformers, about the configuration's rotary embedding
        raise CheckpointError(f"{folder}: config.json: {first_line(error)[:200]}") from None
    tensors = {name: tensor_of(stored) for name, stored in weights.tensors.items()}
    made.load_state_dict({**tensors, "d2t": tensors["d2t"].long(), "t2d": tensors["t2d"].bool()}, assign=True)
    return made.requires_grad_(False).eval()


def write_head(
    folder: Path, head: EagleHead, layout: str = "specforge", embedding: Tensor | None = None, verifier: str = ""
) -> None:
    """Writes the head in its dtype. Without `embedding` loaders use the target's. Raises ValueError."""
    folder.mkdir(parents=True, exist_ok=True)
    dtype = str(head.fc.weight.dtype).removeprefix("torch.")
    write_head_config(folder, head.config, layout, dtype, verifier)
    tensors = {name.replace(LAYER["specforge"], LAYER[layout], 1): t for name, t in head.state_dict().items()}
    if embedding is not None:
        tensors[EMBEDDING] = embedding
    kept = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    save_tensors(folder / SAFETENSORS, kept)
