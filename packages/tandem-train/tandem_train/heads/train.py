"""Trains an EAGLE-3 head on the target's continuations, for Tandem, vLLM and SGLang.

    python -m tandem_train.heads.train --data DIR --output HEAD

An interrupted run, started again with the same arguments, resumes from its last saved step.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from tandem.checkpoints.gguf_cache import unpacked
from tandem.checkpoints.head_config import HeadConfig
from tandem.checkpoints.locate import find, weights_revision
from tandem.runners.eagle.files import write_head
from tandem.runners.eagle.module import EagleHead
from tandem_train.heads.loop import FeatureTarget, HeadTraining
from tandem_train.settings import HeadTrainConfig, run_command, show
from tandem_train.train import best_counts, most_frequent, read_data


def new_head(target: Any, config: HeadTrainConfig, counts: Tensor, layers: tuple[int, ...]) -> EagleHead:
    """An untrained head: output rows of the target, a layer random by `config.seed`."""
    theirs = target.config
    theta = float((getattr(theirs, "rope_parameters", None) or {}).get("rope_theta", 10000.0))
    output = target.get_output_embeddings().weight.detach().float()
    ids = most_frequent(counts, config.vocabulary)
    torch.manual_seed(config.seed)
    head = EagleHead(
        HeadConfig(
            hidden_size=theirs.hidden_size,
            num_attention_heads=theirs.num_attention_heads,
            num_key_value_heads=getattr(theirs, "num_key_value_heads", None) or theirs.num_attention_heads,
            head_dim=getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads,
            intermediate_size=config.intermediate or theirs.intermediate_size,
            vocab_size=theirs.vocab_size,
            draft_vocab_size=len(ids),
            target_hidden_size=theirs.hidden_size,
            layers=layers,
            rms_norm_eps=theirs.rms_norm_eps,
            max_position_embeddings=theirs.max_position_embeddings,
            rope={"rope_type": "default", "rope_theta": theta},
        )
    )
    head.narrow_to(ids)
    head.lm_head.weight.data.copy_(output[ids])
    head.norm.weight.data.copy_(target.base_model.norm.weight.detach().float())
    return head


def train(config: HeadTrainConfig, show: Callable[[str], None]) -> dict[str, Any]:
    """Trains, writes config.output, returns its training.json. Raises ValueError."""
    from transformers import AutoModelForCausalLM

    from tandem.runners.loading import transformers_logging
    from tandem.runners.torch.platforms import choose_platform

    transformers_logging()
    checkpoint = unpacked(find(config.target))
    revision = weights_revision(checkpoint)
    target: Any = AutoModelForCausalLM.from_pretrained(**checkpoint.source, dtype=torch.float32)
    device = choose_platform(config.device).name
    taps = FeatureTarget(checkpoint.source, config.layers, device, max(config.batch, 2048))
    data, held_out = read_data(config.data, revision)
    counts, tokens = best_counts(data, 1, target.config.vocab_size), sum(len(one.answer) for one in data)
    head = new_head(target, config, counts, taps.layers).to(device)
    embedding: Tensor = target.get_input_embeddings().weight.detach().to(device)
    del target
    steps = max(1, round(config.epochs * tokens / config.batch))
    show(f"{tokens:,} tokens in {len(data):,} sequences, {head.config.draft_vocab_size:,} columns, "
         f"{sum(p.numel() for p in head.parameters()):,} parameters, about {steps:,} steps")  # fmt: skip
    training = HeadTraining(config, head, embedding, taps, steps, show)
    seconds = training.run(data)
    report = {
        "config": json.loads(json.dumps(asdict(config), default=str)),
        "target": revision,
        "target_name": checkpoint.name,
        "train_tokens": tokens,
        "train_sequences": len(data),
        "columns": head.config.draft_vocab_size,
        "layers": list(taps.layers),
        "steps": steps,
        "device": device if device == "cpu" else torch.cuda.get_device_name(),
        "seconds": round(seconds, 1),
        "held_out_agreement": training.agreement(held_out),
    }
    write_head(config.output, head.to("cpu", getattr(torch, config.dtype)))
    (config.output / "training.json").write_text(json.dumps(report, indent=2) + "\n")
    config.state.unlink(missing_ok=True)
    return report


def main(argv: Sequence[str] | None = None) -> int:
    def work(config: HeadTrainConfig) -> None:
        print(json.dumps(train(config, show)["held_out_agreement"]))
        measuring = "python main.py --role accept --draft eagle --draft_model"
        print(f"wrote {config.output}; measure it with: {measuring} {config.output}")

    return run_command("Trains an EAGLE-3 head on what generate wrote.", HeadTrainConfig, argv, work)


if __name__ == "__main__":
    sys.exit(main())
