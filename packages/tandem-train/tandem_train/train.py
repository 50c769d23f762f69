"""Trains a draft on the data of `generate`, and writes a Hugging Face folder.

    python -m tandem_train.train --data DIR --output DRAFT [--epochs 4]

It can be interrupted and started again with the same arguments: it resumes from the last saved step.
"""

from __future__ import annotations

import argparse
import json
import sys
import zlib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tandem.checkpoints.gguf_cache import unpacked
from tandem.checkpoints.locate import FREQUENT_TOKENS, find, weights_revision
from tandem.checkpoints.tensors import save_whole
from tandem.checkpoints.tokenizers import write_tokenizer
from tandem_train.distill import Softmax, agreement
from tandem_train.loop import Training, TrainingData
from tandem_train.settings import HELD_OUT, TrainConfig
from tandem_train.shards import ShardFolder, TrainingSequence, split
from tandem_train.student import StudentConfig, build, load_trained, shape_of


def read_data(config: TrainConfig, revision: str, vocab_size: int) -> TrainingData:
    folder = ShardFolder(config.data)
    if folder.meta()["target"] != revision:
        raise ValueError(f"{config.data}: holds data of the target {folder.meta()['target']}, not {revision}")
    everything = [answered for number in folder.numbers() for answered in split(folder.read(number))]
    apart = held_out_prompts({answered.prompt.tobytes() for answered in everything})
    held_out = [answered for answered in everything if answered.prompt.tobytes() in apart]
    train: list[TrainingSequence] = []
    tokens, counts = 0, np.zeros(vocab_size, np.int64)
    for answered in everything:
        if answered.prompt.tobytes() in apart or (config.max_tokens is not None and tokens >= config.max_tokens):
            continue
        train.append(answered)
        tokens += len(answered.answer)
        counts += np.bincount(answered.ids[:, :4].ravel(), minlength=vocab_size)
    if not train:
        raise ValueError(f"{config.data}: no shard to train on")
    return TrainingData(train, held_out, tokens, torch.from_numpy(counts))


def held_out_prompts(prompts: set[bytes]) -> set[bytes]:
    """Selects one prompt in HELD_OUT, at least one, independently of the order of the data."""
    return set(sorted(prompts, key=lambda p: (zlib.crc32(p), p))[: -(-len(prompts) // HELD_OUT)])


def most_frequent(counts: torch.Tensor, most: int) -> torch.Tensor:
    """Returns the ids that occur, at most the `most` frequent ones, in ascending order."""
    ids = counts.argsort(descending=True, stable=True)[:most]
    return ids[counts[ids] > 0].sort().values


def _begin(config: TrainConfig, source: dict[str, Any], revision: str) -> tuple[TrainingData, Any]:
    """Returns the data, and the student before its first step."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if config.start:
        theirs = AutoConfig.from_pretrained(**source)
        return read_data(config, revision, theirs.vocab_size), load_trained(config.start, theirs)
    target: Any = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    data = read_data(config, revision, target.config.vocab_size)
    return data, build(target, config.student, data.counts, config.seed)


def train(config: TrainConfig, show: Callable[[str], None]) -> dict[str, Any]:
    """Trains, writes config.output, and returns the content of its training.json."""
    from tandem.runners.loading import transformers_logging
    from tandem.runners.torch.platforms import choose_platform

    transformers_logging()
    device = choose_platform(config.device).name
    checkpoint = unpacked(find(config.target))
    source, revision = checkpoint.source, weights_revision(checkpoint)
    data, student = _begin(config, source, revision)
    student.to(device)
    seen = most_frequent(data.counts, config.softmax)
    softmax = Softmax(seen, student.config.vocab_size, config.others, device)
    steps = max(1, round(config.epochs * data.tokens / config.batch))
    show(f"{data.tokens:,} tokens in {len(data.train):,} sequences, {len(seen):,} tokens in every softmax, "
         f"{sum(p.numel() for p in student.parameters()):,} parameters, about {steps:,} steps")  # fmt: skip
    seconds = Training(config, student, softmax, data, steps, show).run()
    report = {
        "config": json.loads(json.dumps(asdict(config) | {"student": asdict(shape_of(student))}, default=str)),
        "target": revision,
        "train_tokens": data.tokens,
        "train_sequences": len(data.train),
        "steps": steps,
        "seconds": round(seconds, 1),
        "held_out_agreement": {k: round(h / n, 4) for k, (h, n) in agreement(student, data.held_out).items()},
    }
    save_whole(config.output, student.half().save_pretrained)
    (config.output / FREQUENT_TOKENS).write_text(json.dumps(seen.tolist()) + "\n")
    write_tokenizer(checkpoint, config.output)
    (config.output / "training.json").write_text(json.dumps(report, indent=2) + "\n")
    config.state.unlink(missing_ok=True)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description="Trains a draft on what generate wrote.")
    shape, run = StudentConfig(), TrainConfig(Path(), Path())
    parser.add_argument("--data", type=Path, required=True, help="folder that generate wrote")
    parser.add_argument("--output", type=Path, required=True, help="folder for the draft")
    parser.add_argument("--target_model", "--target-model", help="target (default: the embedded one)")
    parser.add_argument(
        "--start", type=Path, help="a draft with the target's vocabulary to train further, in its shape"
    )
    parser.add_argument("--hidden", type=int, default=shape.hidden)
    parser.add_argument("--layers", type=int, default=shape.layers)
    parser.add_argument("--heads", type=int, default=shape.heads)
    parser.add_argument("--feed-forward", type=int, default=shape.feed_forward)
    parser.add_argument("--epochs", type=float, default=run.epochs)
    parser.add_argument("--batch", type=int, default=run.batch, help=f"tokens per step (default {run.batch})")
    parser.add_argument("--rate", type=float, default=run.rate, help=f"learning rate (default {run.rate})")
    parser.add_argument("--hard", type=float, default=run.hard, help="weight of the target's first choice, 0 to 1")
    parser.add_argument("--max-tokens", type=int, help="the most tokens of the data to use, for a learning curve")
    parser.add_argument("--seed", type=int, default=run.seed)
    parser.add_argument("--device", default="auto")
    args = vars(parser.parse_args())
    try:
        student = StudentConfig(*(args.pop(name) for name in ("hidden", "layers", "heads", "feed_forward")))
        config = TrainConfig(target=args.pop("target_model"), student=student, **args)
        report = train(config, lambda line: print(line, file=sys.stderr, flush=True))
    except ValueError as error:
        print(f"train: {error}", file=sys.stderr)
        return 2
    print(json.dumps(report["held_out_agreement"]))
    command = f"python -m tandem_train.evaluate --draft_model {config.output}"
    print(f"wrote {config.output}; measure it with: {command}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
