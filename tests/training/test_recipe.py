"""generate and train on a tiny Qwen2 with a byte tokenizer: the whole recipe in seconds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from tandem.comparison.measuring.workloads import built_in_prompts
from tandem_train.generate import GenerateConfig, generate
from tandem_train.prompts import grammar, training_prompt
from tandem_train.shards import ShardFolder
from tandem_train.train import train
from tandem_train.training_settings import TrainConfig
from tests.runners.tiny import byte_tokenizer

TEMPLATE = "{% for m in messages %}<u>{{ m['content'] }}</u>{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
STUDENT: dict[str, Any] = {"hidden": 24, "layers": 1, "heads": 2, "feed_forward": 32}


def quiet(line: str) -> None:
    pass


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 of 258 tokens. Its embeddings are large, so that its choices are clear and can be learnt."""
    folder = tmp_path_factory.mktemp("tiny-target")
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(4)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    ends = {"eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None, "max_position_embeddings": 512}
    module = Qwen2ForCausalLM(Qwen2Config(vocab_size=258, num_hidden_layers=2, **sizes, **ends))
    module.lm_head.weight.data *= 10
    module.save_pretrained(folder)
    return folder


def generating(target: Path, output: Path, **changes: Any) -> GenerateConfig:
    config = GenerateConfig(
        output, str(target), tokens=1200, own=6, shard=30, rows=8, max_prompt=40, max_new_tokens=24, dtype="float32"
    )
    return replace(config, **changes)


@pytest.fixture(scope="module")
def data(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("data")
    assert generate(generating(target, output), quiet) >= 1200
    return output


def answers(folder: Path, number: int) -> dict[tuple[int, ...], list[tuple[float, tuple[int, ...]]]]:
    found: dict[tuple[int, ...], list[tuple[float, tuple[int, ...]]]] = {}
    for one in ShardFolder(folder).read(number):
        found.setdefault(tuple(one.prompt), []).append((one.temperature, tuple(one.answer)))
    return {prompt: sorted(said) for prompt, said in found.items()}


@pytest.mark.thorough
def test_greedy_training_data_is_what_transformers_generates(target: Path, data: Path) -> None:
    module = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    checked = 0
    for one in ShardFolder(data).read(0)[:12]:
        assert one.ids.shape == one.logprobs.shape == (len(one.answer), 24)
        assert (np.diff(one.logprobs, axis=1) <= 0).all()
        if one.temperature:
            continue
        prompt = torch.from_numpy(one.prompt.astype(np.int64))[None]
        out = module.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=len(one.answer), do_sample=False
        )
        assert out[0, prompt.shape[1] :].tolist() == one.answer.tolist() == one.ids[:, 0].tolist()
        checked += 1
    assert checked >= 3


@pytest.mark.thorough
def test_generation_cut_short_goes_on_with_the_same_data(target: Path, data: Path, tmp_path: Path) -> None:
    generate(generating(target, tmp_path, tokens=1), quiet)
    assert ShardFolder(tmp_path).numbers() == [0]
    written = (tmp_path / "shard-00000.npz").stat().st_mtime_ns
    generate(generating(target, tmp_path), quiet)
    assert (tmp_path / "shard-00000.npz").stat().st_mtime_ns == written
    assert ShardFolder(tmp_path).numbers() == ShardFolder(data).numbers()
    for number in ShardFolder(data).numbers():
        assert answers(tmp_path, number) == answers(data, number)


@pytest.mark.thorough
def test_data_of_another_seed_or_target_is_refused(target: Path, data: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds data made with seed 1, not 2"):
        generate(generating(target, data, seed=2), quiet)
    with pytest.raises(ValueError, match="holds data of the target"):
        train(TrainConfig(data, tmp_path / "draft", **STUDENT), quiet)


def training(target: Path, data: Path, output: Path, **changes: Any) -> TrainConfig:
    config = TrainConfig(data, output, str(target), **STUDENT, epochs=12, batch=256, warm_up=5, device="cpu")
    return replace(config, **changes)


@pytest.fixture(scope="module")
def trained(target: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A draft, trained once for whoever looks at one, and what training said."""
    folder = tmp_path_factory.mktemp("trained") / "draft"
    return folder, train(training(target, data, folder), quiet)


@pytest.mark.thorough
def test_training_makes_the_draft_agree_and_transformers_loads_it(
    target: Path, data: Path, trained: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    few = train(training(target, data, tmp_path / "few", epochs=0.1), quiet)
    folder, many = trained
    assert many["held_out_agreement"] > few["held_out_agreement"] + 0.1
    module, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and module.config.vocab_size == 258
    assert not (folder / "training_state.pt").exists()


def test_settings_out_of_range_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max-new-tokens: 0 is below 1"):
        GenerateConfig(tmp_path, max_new_tokens=0)
    with pytest.raises(ValueError, match="hard: 2"):
        TrainConfig(tmp_path, tmp_path, hard=2)


def test_no_built_in_prompt_is_trained_on() -> None:
    held_out = {" ".join(prompt.text.split()) for prompt in built_in_prompts()}
    own = {"instructions": ["Say something."], "raw": ["Many years ago the river froze."]}
    made = [training_prompt(1, i, own) for i in range(20_000)]
    assert {prompt.kind for prompt in made} == {*grammar()["kinds"]}
    assert not held_out & {" ".join(prompt.text.split()) for prompt in made}
    assert len({prompt.text for prompt in made}) > 12_000
