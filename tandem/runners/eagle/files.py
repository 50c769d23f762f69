"""Reads and writes heads as folders that vLLM and SGLang load: config.json and model.safetensors."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from tandem.checkpoints.head_config import HeadConfig, read_head_config, write_head_config
from tandem.checkpoints.locate import CheckpointError, first_line
from tandem.checkpoints.tensors import SAFETENSORS, Tensors, save_tensors
from tandem.runners.eagle.module import EagleHead

EMBEDDING = "embed_tokens.weight"
_LAYER = {"specforge": "midlayer.", "speculators": "layers.0."}


def read_head(folder: Path) -> tuple[EagleHead, Tensor | None]:
    """The head in the dtype of its file, and its own embedding [vocabulary, hidden] if it has one.

    Reads both layouts. Raises CheckpointError, which names what is missing, unknown or of another shape.
    """
    config = read_head_config(folder)
    tensors = Tensors(folder)
    found = {_our_name(name): tensors[name] for name in tensors.files}
    embedding = found.pop(EMBEDDING, None)
    if embedding is not None and tuple(embedding.shape) != (config.vocab_size, config.hidden_size):
        raise CheckpointError(f"{folder}: {EMBEDDING} is {list(embedding.shape)}, not vocabulary by hidden size")
    if "lm_head.weight" in found:
        _complete_vocabulary(config, found)
    try:
        with torch.device("meta"):
            head = EagleHead(config)
    except Exception as error:  # of transformers, about the configuration's rotary embedding
        raise CheckpointError(f"{folder}: config.json: {first_line(error)[:200]}") from None
    _check(folder, head.state_dict(), found)
    dtype = found["fc.weight"].dtype
    kept = {name: value if name in ("d2t", "t2d") else value.to(dtype) for name, value in found.items()}
    made = EagleHead(config)
    made.load_state_dict({**kept, "d2t": kept["d2t"].long(), "t2d": kept["t2d"].bool()}, assign=True)
    _check_vocabulary(folder, made)
    return made.requires_grad_(False).eval(), embedding


def _our_name(name: str) -> str:
    name = name.removeprefix("model.")
    return name.replace(_LAYER["speculators"], _LAYER["specforge"], 1)


def _complete_vocabulary(config: HeadConfig, found: dict[str, Tensor]) -> None:
    """A head for all of the target's tokens may lack the two maps, and any may lack t2d, which follows from d2t."""
    if "d2t" not in found and config.draft_vocab_size == config.vocab_size:
        found["d2t"] = torch.zeros(config.vocab_size, dtype=torch.int64)
    if "t2d" not in found and "d2t" in found:
        ids = found["d2t"].long() + torch.arange(len(found["d2t"]))
        found["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool)
        found["t2d"][ids[(ids >= 0) & (ids < config.vocab_size)]] = True


def _check(folder: Path, wanted: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    if missing := sorted(set(wanted) - set(found)):
        raise CheckpointError(f"{folder}: the head lacks {', '.join(missing[:3])}")
    if unknown := sorted(set(found) - set(wanted)):
        raise CheckpointError(f"{folder}: the head has {', '.join(unknown[:3])}, which EAGLE-3 heads do not have here")
    for name, tensor in wanted.items():
        if found[name].shape != tensor.shape:
            raise CheckpointError(f"{folder}: {name} is {list(found[name].shape)}, not {list(tensor.shape)}")


def _check_vocabulary(folder: Path, head: EagleHead) -> None:
    ids = head.token_ids
    if int(ids.min()) < 0 or int(ids.max()) >= head.config.vocab_size or len(ids.unique()) != len(ids):
        raise CheckpointError(f"{folder}: d2t does not name {len(ids)} tokens of {head.config.vocab_size}")


def write_head(
    folder: Path, head: EagleHead, layout: str = "specforge", embedding: Tensor | None = None, verifier: str = ""
) -> None:
    """Writes the head in its dtype. Without an `embedding`, loaders take the target's. Raises ValueError."""
    folder.mkdir(parents=True, exist_ok=True)
    dtype = str(head.fc.weight.dtype).removeprefix("torch.")
    write_head_config(folder, head.config, layout, dtype, verifier)
    tensors = {name.replace(_LAYER["specforge"], _LAYER[layout], 1): t for name, t in head.state_dict().items()}
    if embedding is not None:
        tensors[EMBEDDING] = embedding
    kept = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    save_tensors(folder / SAFETENSORS, kept)
