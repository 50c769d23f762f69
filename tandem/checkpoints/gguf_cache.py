"""Unpacks each GGUF file once for module code and graphs: transformers parses one in 15 to 20 s, and the folder in 1 s.

The folder holds float32 weights (unpacking is exact in float32) and the tokenizer; its name is a hash of the file.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from tandem.checkpoints.locate import (
    Checkpoint,
    CheckpointError,
    check_sizes,
    check_unchanged,
    first_line,
    weights_revision,
)
from tandem.checkpoints.made_once import made_once
from tandem.checkpoints.trusted_cache import cache_root

log = logging.getLogger("tandem.engine")
_LAYOUT = 2  # part of the folder's name; increase it when the folder's content changes


def unpacked(checkpoint: Checkpoint) -> Checkpoint:
    """The unpacked folder of a GGUF checkpoint, unpacking it if necessary; other checkpoints unchanged."""
    if checkpoint.gguf is None:
        return checkpoint
    revision = weights_revision(checkpoint)
    key = revision.split(":")[1]

    def make(partial: Path) -> None:
        convert(checkpoint, partial)
        check_unchanged(checkpoint, revision)

    try:
        folder = made_once(f"{checkpoint.name}-{key}-v{_LAYOUT}", f"unpacking {checkpoint.gguf}", make)
    except OSError as error:
        log.warning("cannot cache %s, unpacked, in %s: %s", checkpoint.gguf, cache_root(), error)
        return checkpoint
    return Checkpoint(checkpoint.name, str(folder), revision=revision, packed=str(checkpoint.gguf_file))


def convert(checkpoint: Checkpoint, folder: Path, dtype: str = "float32") -> None:
    """Writes a GGUF's dense weights, in `dtype`, and its tokenizer into `folder`. Raises CheckpointError."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    check_sizes(checkpoint)
    try:
        module: Any = AutoModelForCausalLM.from_pretrained(**_dense(checkpoint), dtype=getattr(torch, dtype))
        tokenizer = AutoTokenizer.from_pretrained(**checkpoint.source)
    except Exception as error:  # parsers of damaged files raise anything
        raise CheckpointError(f"{checkpoint.folder}/{checkpoint.gguf}: cannot be read: {first_line(error)}") from error
    module.hf_quantizer = None
    module.config.__dict__.pop("quantization_config", None)
    module.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _dense(checkpoint: Checkpoint) -> dict[str, object]:
    """from_pretrained's arguments; weights are dequantized, because kernels for packed ones compute differently."""
    import transformers

    source = checkpoint.source
    if hasattr(transformers, "GgufConfig"):
        source["quantization_config"] = transformers.GgufConfig(dequantize=True)
    return source
