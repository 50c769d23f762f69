"""A tiny target of eight layers, its data, and an EAGLE-3 head that learns it in seconds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tandem.checkpoints.convert import ConvertConfig, run_convert
from tandem.checkpoints.locate import find, weights_revision
from tandem_train.heads.train import train
from tandem_train.settings import HeadTrainConfig
from tandem_train.shards import ShardFolder, TrainingSequence
from tests.runners.tiny import byte_tokenizer

KINDS = ("code", "prose")
LENGTH = 24


def quiet(line: str) -> None:
    pass


def make_target(folder: Path, layers: int) -> Path:
    """A Llama of 258 tokens whose choices are clear, and follow mostly from the last token."""
    byte_tokenizer().save_pretrained(folder)
    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    module = LlamaForCausalLM(LlamaConfig(vocab_size=258, num_hidden_layers=layers, eos_token_id=1, **sizes))
    module.lm_head.weight.data *= 10
    module.model.embed_tokens.weight.data *= 20
    module.save_pretrained(folder)
    return folder


def make_data(folder: Path, target: Path, shards: int) -> Path:
    """Greedy continuations, as `generate` writes them."""
    module = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    written, random = ShardFolder(folder), np.random.default_rng(0)
    written.claim({"target": weights_revision(find(str(target))), "seed": 1})
    for number in range(shards):
        written.write(number, continuations(module, random))
    return folder


def continuations(module: Any, random: np.random.Generator) -> list[TrainingSequence]:
    """Greedy continuations of prompts of 1 to 4 tokens, eight of each length."""
    made = []
    for size in range(1, 5):
        prompts = random.integers(2, 258, (8, size))
        tokens = torch.from_numpy(prompts)
        with torch.inference_mode():
            while tokens.shape[1] < size + LENGTH:
                tokens = torch.cat((tokens, module(tokens).logits[:, -1:].argmax(-1)), 1)
            best = module(tokens).logits[:, size - 1 : -1].log_softmax(-1).topk(8)
        for row in range(8):
            prompt, answer = tokens[row, :size].numpy(), tokens[row, size:].numpy()
            ids, logprobs = best.indices[row].numpy(), best.values[row].numpy()
            made.append(
                TrainingSequence(
                    KINDS[row % 2],
                    0.0,
                    prompt.astype(np.int32),
                    answer.astype(np.int32),
                    ids.astype(np.int32),
                    logprobs.astype(np.float16),
                )
            )
    return made


def training(target: Path, data: Path, output: Path, **changes: Any) -> HeadTrainConfig:
    config = HeadTrainConfig(
        data, output, str(target), vocabulary=200, steps=3, epochs=10, batch=160, rate=5e-3, warm_up=5, dtype="float32"
    )
    return replace(config, **changes)


def make_pair(folder: Path) -> None:
    """Writes `target`, `head` as trained, and `draft`, which is the head completed for NxD Inference."""
    target = make_target(folder / "target", 8)
    train(training(target, make_data(folder / "data", target, 2), folder / "head", epochs=40), quiet)
    run_convert(ConvertConfig(folder / "head", folder / "draft", "eagle", target))
