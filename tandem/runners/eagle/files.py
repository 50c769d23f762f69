"""Reads and writes head folders as vLLM and SGLang do: config.json and model.safetensors."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from tandem.checkpoints.head_config import EMBEDDING, HeadWeights, write_head_config
from tandem.checkpoints.locate import CheckpointError, first_line
from tandem.checkpoints.tensors import SAFETENSORS, save_tensors
from tandem.runners.eagle.hidden_states import tensor_of
from tandem.runners.eagle.module import EagleHead


def head_module(folder: Path, weights: HeadWeights) -> EagleHead:
    """Raises CheckpointError."""
    try:
        made = EagleHead(weights.config)
    except Exception as error:  # of transformers, about the configuration's rotary embedding
        raise CheckpointError(f"{folder}: config.json: {first_line(error)[:200]}") from None
    tensors = {name: tensor_of(stored) for name, stored in weights.tensors.items()}
    made.load_state_dict({**tensors, "d2t": tensors["d2t"].long(), "t2d": tensors["t2d"].bool()}, assign=True)
    return made.requires_grad_(False).eval()


def write_head(folder: Path, head: EagleHead, embedding: Tensor | None = None) -> None:
    """Writes the head in its dtype, in SpecForge's layout. Without `embedding` loaders use the target's."""
    folder.mkdir(parents=True, exist_ok=True)
    write_head_config(folder, head.config, str(head.fc.weight.dtype).removeprefix("torch."))
    tensors = head.state_dict()
    if embedding is not None:
        tensors[EMBEDDING] = embedding
    kept = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    save_tensors(folder / SAFETENSORS, kept)
