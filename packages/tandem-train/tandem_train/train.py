"""Trains a draft on `generate`'s data, and writes a Hugging Face folder.

    python -m tandem_train.train --data DIR --output DRAFT [--epochs 4]

An interrupted run, started again with the same arguments, resumes from its last saved step.
"""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tandem.checkpoints.gguf_cache import unpacked
from tandem.checkpoints.locate import FREQUENT_TOKENS, find, weights_revision
from tandem.checkpoints.tensors import save_whole
from tandem.checkpoints.tokenizers import write_tokenizer
from tandem_train.loop import Softmax, Training, agreement
from tandem_train.settings import HELD_OUT, TrainConfig, run_command, show
from tandem_train.shards import ShardFolder, TrainingSequence
from tandem_train.student import build


def read_data(folder: Path, revision: str) -> tuple[list[TrainingSequence], list[TrainingSequence]]:
    """Reads the target's data: to train on, and held out. Raises ValueError."""
    shards = ShardFolder(folder)
    if (of := shards.meta()["target"]) != revision:
        raise ValueError(f"{folder}: holds data of the target {of}, not {revision}")
    everything = [one for number in shards.numbers() for one in shards.read(number) if len(one.answer)]
    prompts = sorted({one.prompt.tobytes() for one in everything}, key=lambda p: (zlib.crc32(p), p))
    apart = {*prompts[: -(-len(prompts) // HELD_OUT)]}  # at least one, whatever the order of the data
    train = [one for one in everything if one.prompt.tobytes() not in apart]
    if not train:
        raise ValueError(f"{folder}: no shard to train on")
    return train, [one for one in everything if one.prompt.tobytes() in apart]


def best_counts(data: Sequence[TrainingSequence], best: int, vocab_size: int) -> torch.Tensor:
    """How often each token is among the target's `best`, [vocabulary]."""
    seen = np.concatenate([one.ids[:, :best].ravel() for one in data])
    return torch.from_numpy(np.bincount(seen, minlength=vocab_size))


def most_frequent(counts: torch.Tensor, most: int) -> torch.Tensor:
    """Ids that occur, at most the `most` frequent, ascending."""
    ids = counts.argsort(descending=True, stable=True)[:most]
    return ids[counts[ids] > 0].sort().values


def train(config: TrainConfig, show: Callable[[str], None]) -> dict[str, Any]:
    """Trains, writes config.output, returns its training.json."""
    from transformers import AutoModelForCausalLM

    from tandem.runners.loading import transformers_logging
    from tandem.runners.torch.platforms import choose_platform

    transformers_logging()
    device = choose_platform(config.device).name
    checkpoint = unpacked(find(config.target))
    revision = weights_revision(checkpoint)
    target: Any = AutoModelForCausalLM.from_pretrained(**checkpoint.source, dtype=torch.float32)
    data, held_out = read_data(config.data, revision)
    counts, tokens = best_counts(data, 4, target.config.vocab_size), sum(len(one.answer) for one in data)
    student = build(target, config, counts).to(device)
    del target
    seen = most_frequent(counts, config.softmax)
    softmax = Softmax(seen, student.config.vocab_size, config.others, device)
    steps = max(1, round(config.epochs * tokens / config.batch))
    show(f"{tokens:,} tokens in {len(data):,} sequences, {len(seen):,} tokens in every softmax, "
         f"{sum(p.numel() for p in student.parameters()):,} parameters, about {steps:,} steps")  # fmt: skip
    seconds = Training(config, student, softmax, steps, show).run(data)
    report = {
        "config": json.loads(json.dumps(asdict(config), default=str)),
        "target": revision,
        "train_tokens": tokens,
        "train_sequences": len(data),
        "steps": steps,
        "seconds": round(seconds, 1),
        "held_out_agreement": round(agreement(student, held_out), 4),
    }
    save_whole(config.output, student.half().save_pretrained)
    (config.output / FREQUENT_TOKENS).write_text(json.dumps(seen.tolist()) + "\n")
    write_tokenizer(checkpoint, config.output)
    (config.output / "training.json").write_text(json.dumps(report, indent=2) + "\n")
    config.state.unlink(missing_ok=True)
    return report


def main(argv: Sequence[str] | None = None) -> int:
    def work(config: TrainConfig) -> None:
        print(json.dumps(train(config, show)["held_out_agreement"]))
        measuring = "python main.py --role accept --draft_model"
        print(f"wrote {config.output}; measure it with: {measuring} {config.output}")

    return run_command("Trains a draft on what generate wrote.", TrainConfig, argv, work)


if __name__ == "__main__":
    sys.exit(main())
