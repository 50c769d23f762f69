"""The simplest draft model: the target's own first layers, untrained, to exercise every code path of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tandem.checkpoints.gguf_cache import unpacked
from tandem.checkpoints.locate import Checkpoint, find
from tandem.checkpoints.tensors import save_whole
from tandem.checkpoints.tokenizers import write_tokenizer


def write_first_layers(target: str | None, layers: int, output: Path) -> Checkpoint:
    """Writes a Hugging Face folder with the first `layers` layers of `target` and its tokenizer. Raises ValueError."""
    import torch
    from transformers import AutoModelForCausalLM

    checkpoint = find(target)
    module: Any = AutoModelForCausalLM.from_pretrained(**unpacked(checkpoint).source, dtype=torch.bfloat16)
    most = module.config.num_hidden_layers
    if not 1 <= layers <= most:
        raise ValueError(f"layers: {layers} is outside 1 to {most}")
    module.base_model.layers = module.base_model.layers[:layers]
    module.config.num_hidden_layers = layers
    if getattr(module.config, "layer_types", None):
        module.config.layer_types = module.config.layer_types[:layers]
    save_whole(output, module.save_pretrained)
    write_tokenizer(checkpoint, output)
    return Checkpoint(f"first-{layers}-layers", str(output))
