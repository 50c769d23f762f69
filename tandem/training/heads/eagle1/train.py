"""Trains an EAGLE-1 head on tokens and features, and writes it as heads are published.

    python -m tandem.training.heads.eagle1.train --data DIR --output HEAD [--target_model T]

It can be interrupted and started again with the same arguments: it resumes from the last saved step. The features must
include the target's last layer: run tandem.training.heads.features with --layers that end in it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from tandem.checkpoints.gguf_cache import unpacked
from tandem.checkpoints.locate import find, weights_revision
from tandem.training.heads.data import HeadData, read_head_data
from tandem.training.heads.eagle1.loop import Eagle1Training, held_out_rounds
from tandem.training.heads.eagle1.loss import FrozenTarget
from tandem.training.heads.eagle1.module import Eagle1Head, head_config, write_eagle1
from tandem.training.heads.eagle1.settings import Eagle1TrainConfig
from tandem.training.heads.settings import HeadTrainConfig


def frozen(target: Any, layers: Sequence[int], device: str) -> FrozenTarget:
    """What the head takes of a transformers module. Raises ValueError unless `layers` of its features have its last."""
    count, hidden = int(target.config.num_hidden_layers), int(target.config.hidden_size)
    if count not in layers:
        wanted = ",".join(map(str, (*sorted(layers)[:2], count)))
        raise ValueError(
            f"layers: the features are of {list(layers)}, and an EAGLE-1 head reads the last, {count};"
            f" run tandem.training.heads.features with --layers {wanted}"
        )
    at = list(layers).index(count) * hidden
    return FrozenTarget(
        target.base_model.norm.to(device),
        target.get_input_embeddings().weight.detach().to(device),
        target.get_output_embeddings().weight.detach().to(device),
        slice(at, at + hidden),
    )


def train(config: Eagle1TrainConfig, show: Callable[[str], None]) -> dict[str, Any]:
    """Trains, writes config.output, and returns the content of its training.json. Raises ValueError."""
    from transformers import AutoModelForCausalLM

    from tandem.runners.loading import transformers_logging

    transformers_logging()
    checkpoint = unpacked(find(config.target))
    revision = weights_revision(checkpoint)
    module: Any = AutoModelForCausalLM.from_pretrained(**checkpoint.source, dtype=torch.float32)
    module = module.requires_grad_(False).eval()
    data = _data(config, revision, module.config.vocab_size)
    layers = data.meta["layers"]
    assert isinstance(layers, list)
    target = frozen(module, layers, config.device)
    torch.manual_seed(config.seed)
    head = Eagle1Head(head_config(module.config, config.intermediate)).to(config.device)
    del module
    steps = max(1, round(config.epochs * data.tokens / config.batch))
    show(f"{data.tokens:,} tokens in {len(data.train):,} sequences, {sum(p.numel() for p in head.parameters()):,}"
         f" parameters, about {steps:,} steps")  # fmt: skip
    seconds = Eagle1Training(config, head, target, data, steps, show).run()
    report = {
        "kind": "eagle1",
        "config": json.loads(json.dumps(asdict(config), default=str)),
        "target": revision,
        "target_name": checkpoint.name,
        "train_tokens": data.tokens,
        "train_sequences": len(data.train),
        "steps": steps,
        "seconds": round(seconds, 1),
        "held_out_kinds": list(config.held_out_kinds),
        "held_out": held_out_rounds(head, target, data),
    }
    write_eagle1(config.output, head.to(getattr(torch, config.dtype)))
    (config.output / "training.json").write_text(json.dumps(report, indent=2) + "\n")
    config.state.unlink(missing_ok=True)
    return report


def _data(config: Eagle1TrainConfig, revision: str, vocab_size: int) -> HeadData:
    shared = HeadTrainConfig(
        config.data, config.output, max_tokens=config.max_tokens, held_out_kinds=config.held_out_kinds
    )
    return read_head_data(shared, revision, vocab_size)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Trains an EAGLE-1 head on what generate and features wrote.")
    default = {one.name: one.default for one in fields(Eagle1TrainConfig)}
    parser.add_argument("--data", type=Path, required=True, help="folder that generate and features wrote")
    parser.add_argument("--output", type=Path, required=True, help="folder for the head")
    parser.add_argument("--target_model", "--target-model", help="target (default: the embedded one)")
    parser.add_argument("--intermediate", type=int, help="feed-forward width (default: the target's)")
    for name, what in (
        ("regression", "weight of the hidden states' loss"),
        ("classification", "weight of the tokens' loss"),
        ("noise", "width of the noise on what the head reads"),
        ("epochs", "times that the data is seen"),
        ("rate", "learning rate"),
    ):
        parser.add_argument(f"--{name}", type=float, default=default[name], help=f"{what} (default {default[name]})")
    parser.add_argument("--batch", type=int, default=default["batch"], help="answered tokens per step")
    parser.add_argument("--max-tokens", type=int, help="the most tokens of the data to use, for a learning curve")
    parser.add_argument("--held-out-kinds", default="", help="kinds of prompts to keep out, such as code,prose")
    parser.add_argument("--dtype", default=default["dtype"], help="of the file: bfloat16, float16 or float32")
    parser.add_argument("--device", default=default["device"], help="cpu or cuda")
    parser.add_argument("--seed", type=int, default=default["seed"])
    args = vars(parser.parse_args(argv))
    try:
        kinds = tuple(filter(None, args.pop("held_out_kinds").split(",")))
        target = args.pop("target_model")
        config = Eagle1TrainConfig(target=target, held_out_kinds=kinds, **args)
        report = train(config, lambda line: print(line, file=sys.stderr, flush=True))
    except ValueError as error:
        print(f"train: {error}", file=sys.stderr)
        return 2
    print(json.dumps(report["held_out"]))
    print(f"wrote {config.output}; measure it with: python -m tandem.training.heads.eagle1.evaluate --draft_model"
          f" {config.output}; for NxD Inference: python main.py --role convert --convert eagle --draft_model"
          f" {config.output} --target_model {target or 'DIR'} --output DIR2")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
