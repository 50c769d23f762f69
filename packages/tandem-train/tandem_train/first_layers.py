"""Writes the simplest draft model: the target's own first layers, untrained.

    python -m tandem_train.first_layers --layers 20 --output DIR

It agrees with the target on about 20 % of the tokens (for 20 of the embedded target's 30 layers) and costs most of its
time, so it never pays. It serves to exercise every code path of a draft model.
"""

from __future__ import annotations

import argparse
import sys
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


def main() -> int:
    parser = argparse.ArgumentParser(description="Writes the target's first layers as an (untrained) draft model.")
    parser.add_argument("--target_model", "--target-model", help="target (default: the embedded one)")
    parser.add_argument("--layers", type=int, default=20, help="layers to keep (default 20)")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    args = parser.parse_args()
    try:
        checkpoint = write_first_layers(args.target_model, args.layers, args.output)
    except ValueError as error:
        print(f"first_layers: {error}", file=sys.stderr)
        return 2
    print(f"wrote {checkpoint.folder}; use it with --draft_model {checkpoint.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
