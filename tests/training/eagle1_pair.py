"""A tiny target, its data, and an EAGLE-1 head that learns it in seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tandem.checkpoints.convert import ConvertConfig, run_convert
from tandem.checkpoints.locate import find, weights_revision
from tandem.training.heads.eagle1.settings import Eagle1TrainConfig
from tandem.training.heads.eagle1.train import train
from tandem.training.heads.features import FeaturesConfig, make_features
from tandem.training.shards import ShardFolder, join
from tests.runners.tiny import byte_tokenizer
from tests.training.test_heads import continuations, quiet


def make_target(folder: Path) -> Path:
    """A Llama of 258 tokens whose choices are clear, and follow mostly from the last token."""
    byte_tokenizer().save_pretrained(folder)
    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    module = LlamaForCausalLM(LlamaConfig(vocab_size=258, num_hidden_layers=2, eos_token_id=1, **sizes))
    module.lm_head.weight.data *= 10
    module.model.embed_tokens.weight.data *= 20
    module.save_pretrained(folder)
    return folder


def make_data(folder: Path, target: Path) -> Path:
    """Greedy continuations with features."""
    module = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    shards = ShardFolder(folder)
    shards.claim({"target": weights_revision(find(str(target))), "seed": 1})
    shards.write(0, join(continuations(module, np.random.default_rng(0))))
    make_features(FeaturesConfig(folder, str(target), dtype="float32"), quiet)
    return folder


def training(target: Path, data: Path, output: Path, **changes: Any) -> Eagle1TrainConfig:
    """Seconds of training."""
    own: dict[str, Any] = {"epochs": 40, "batch": 160, "rate": 4e-3, "warm_up": 5, "noise": 0.1, "dtype": "float32"}
    return Eagle1TrainConfig(data, output, str(target), **own | changes)


def make_pair(folder: Path) -> None:
    """Writes `target`, `head` as trained, and `draft`, which is the head completed for NxD Inference."""
    target = make_target(folder / "target")
    train(training(target, make_data(folder / "data", target), folder / "head"), quiet)
    run_convert(ConvertConfig(folder / "head", folder / "draft", "eagle", target))
