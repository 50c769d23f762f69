"""Trains a draft on `generate`'s data, and writes a Hugging Face folder.

The draft has the target's embeddings in fewer dimensions, and new layers: a plain Llama with tied embeddings, which
every loader supports. Embeddings are most of a small draft's bytes, so the file size sets the hidden size, and the
feed-forward width takes the rest.

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
from torch import Tensor

from tandem.checkpoints.gguf_cache import unpacked
from tandem.checkpoints.locate import FREQUENT_TOKENS, find, weights_revision
from tandem.checkpoints.tensors import save_whole
from tandem.checkpoints.tokenizers import write_tokenizer
from tandem_train.shards import ShardFolder, TrainingSequence
from tandem_train.train_loop import Softmax, Training, agreement
from tandem_train.training_settings import HELD_OUT, TrainConfig, run_command, show

ROPE_THETA = 1e6


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


def best_counts(data: Sequence[TrainingSequence], best: int, vocab_size: int) -> Tensor:
    """How often each token is among the target's `best`, [vocabulary]."""
    seen = np.concatenate([one.ids[:, :best].ravel() for one in data])
    return torch.from_numpy(np.bincount(seen, minlength=vocab_size))


def most_frequent(counts: Tensor, most: int) -> Tensor:
    """Ids that occur, at most the `most` frequent, ascending."""
    ids = counts.argsort(descending=True, stable=True)[:most]
    return ids[counts[ids] > 0].sort().values


def build(target: Any, config: TrainConfig, counts: Tensor) -> Any:
    """`counts` [vocabulary]: how often the target generated each token."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(config.seed)
    theirs = target.config
    student = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=theirs.vocab_size,
            hidden_size=config.hidden,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.heads,
            intermediate_size=config.feed_forward,
            max_position_embeddings=theirs.max_position_embeddings,
            tie_word_embeddings=True,
            rms_norm_eps=1e-5,
            attention_bias=True,  # lets a head attend by distance alone
            rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
            bos_token_id=theirs.bos_token_id,
            eos_token_id=theirs.eos_token_id,
            pad_token_id=theirs.pad_token_id,
        )
    )
    head = target.get_output_embeddings().weight.detach().float()
    student.get_input_embeddings().weight.data.copy_(_reduced(head, counts.float(), config.hidden))
    for layer in student.model.layers:  # residual branches start small, as in GPT-2 (Radford et al. 2019)
        layer.self_attn.o_proj.weight.data /= (2 * config.layers) ** 0.5
        layer.mlp.down_proj.weight.data /= (2 * config.layers) ** 0.5
    init_induction_heads(student, counts.float())
    return student


def _reduced(embeddings: Tensor, counts: Tensor, hidden: int) -> Tensor:
    """Projects `embeddings` [vocabulary, d] on their principal directions, weighted by frequency."""
    weights = (counts + 1).sqrt()
    weights = weights / weights.sum()
    centred = embeddings - (weights[:, None] * embeddings).sum(0)
    covariance = centred.T @ (weights[:, None] * centred)
    values, directions = torch.linalg.eigh(covariance)
    kept = directions[:, values.argsort(descending=True)[:hidden]]
    if kept.shape[1] < hidden:
        kept = torch.nn.functional.pad(kept, (0, hidden - kept.shape[1]))
    reduced = centred @ kept
    return reduced * (0.05 / reduced.std())


@torch.no_grad()
def init_induction_heads(student: Any, counts: Tensor) -> None:
    """Initializes an induction circuit (Olsson et al. 2022) in the first two layers.

    Repeated text is easiest to predict, but a small model learns it last, after millions of tokens. In the first layer,
    head 0 attends to the previous token (rotary positions turn its query and key biases into a peak at distance 1) and
    copies its leading components to the last dimensions, which hold least. In the second layer, heads attend where this
    copy matches the current token, in the slow rotary frequencies, and output that position's token. Unchanged: models
    with one layer or heads smaller than 16.
    """
    heads, hidden = student.config.num_attention_heads, student.config.hidden_size
    size = hidden // heads
    if len(student.model.layers) < 2 or size < 16:
        return
    embeddings = student.get_input_embeddings().weight
    half, fast = size // 2, size // 4
    slow = torch.cat((torch.arange(3 * size // 16, half), half + torch.arange(3 * size // 16, half)))
    noted = torch.arange(len(slow))
    mean, deviation = _moments(embeddings, counts, len(slow))
    note = hidden - len(slow) + noted
    embeddings[:, note] *= 0.2

    before = student.model.layers[0].self_attn
    _clear(before, 0, size)
    angles = ROPE_THETA ** (-torch.arange(fast) / half)
    before.k_proj.bias[:fast] = 7.0
    before.q_proj.bias[:fast] = 7.0 * angles.cos()
    before.q_proj.bias[half : half + fast] = -7.0 * angles.sin()
    before.v_proj.weight[noted, noted] = 1 / deviation
    before.v_proj.bias[noted] = -mean / deviation
    before.o_proj.weight[note, noted] = 0.12

    again = student.model.layers[1].self_attn
    for head in range(max(1, min(heads - 2, hidden // size))):
        first = head * size
        carried = first + torch.arange(size)
        _clear(again, first, size)
        again.q_proj.weight[first + slow, noted] = 4 / deviation
        again.k_proj.weight[first + slow, note] = 1.0
        again.v_proj.weight[carried, carried] = 1.0
        again.o_proj.weight[carried, carried] = 0.4


def _moments(embeddings: Tensor, counts: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Mean and deviation of the leading components after a layer's norm, weighted by frequency."""
    seen = embeddings / embeddings.pow(2).mean(1, keepdim=True).sqrt().clamp(min=1e-6)
    weights = ((counts + 1e-3) / (counts + 1e-3).sum())[:, None]
    mean = (weights * seen).sum(0)
    return mean[:size], (weights * (seen - mean) ** 2).sum(0).sqrt().clamp(min=1e-3)[:size]


def _clear(attention: Any, first: int, size: int) -> None:
    for part in (attention.q_proj, attention.k_proj, attention.v_proj):
        part.weight[first : first + size] = 0
        part.bias[first : first + size] = 0
    attention.o_proj.weight[:, first : first + size] = 0


def train(config: TrainConfig, show: Callable[[str], None]) -> dict[str, Any]:
    """Trains, writes config.output, returns its training.json."""
    from transformers import AutoModelForCausalLM

    from tandem.runners.load_runner import transformers_logging
    from tandem.runners.torch.platforms import choose_platform

    transformers_logging()
    device = choose_platform(config.device).name
    checkpoint = unpacked(find(config.target_model))
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
        measuring = "python compare_architectures.py --architectures autoregressive,fused --draft-model"
        print(f"wrote {config.output}; measure it with: {measuring} {config.output}")

    return run_command("Trains a draft on what generate wrote.", TrainConfig, argv, work)


if __name__ == "__main__":
    sys.exit(main())
