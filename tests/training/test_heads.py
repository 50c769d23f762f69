"""Training of EAGLE-3 heads, on a tiny Llama over bytes whose text a head can learn in seconds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tandem.checkpoints.head_config import read_head_config
from tandem.checkpoints.locate import find, weights_revision
from tandem.engine.batcher import Batcher
from tandem.engine.generators import fused_generator
from tandem.engine.load_models import load_pair
from tandem.engine.model_config import DraftChoice, ModelConfig
from tandem.runners.eagle.eagle_runner import EagleRunner
from tandem.runners.eagle.hidden_states import TargetFeatures
from tandem.runners.eagle.module import EagleHead
from tandem.runners.load_runner import Execution, Shape
from tandem.runners.protocol import Limits, PrefillRow, RunnerIdentity
from tandem.runners.torch.platforms import platform_of
from tandem.speculation.types import GenerationRequest, SamplingParams
from tandem_train.heads.train_head import FeatureTarget, HeadTraining, head_states, train
from tandem_train.heads.train_head import main as train_main
from tandem_train.shards import ShardFolder, TrainingSequence
from tandem_train.train import read_data
from tandem_train.train_loop import make_batch
from tandem_train.training_settings import HeadTrainConfig
from tests.rows import propose_row
from tests.runners.modules import read_head
from tests.runners.tiny import byte_tokenizer
from tests.support import answer

pytestmark = pytest.mark.usefixtures("one_thread")
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
                    *("code", 0.0, prompt.astype(np.int32), answer.astype(np.int32)),
                    *(ids.astype(np.int32), logprobs.astype(np.float16)),
                )
            )
    return made


def training(target: Path, data: Path, output: Path, **changes: Any) -> HeadTrainConfig:
    config = HeadTrainConfig(
        data, output, str(target), vocabulary=200, steps=3, epochs=10, batch=160, rate=5e-3, warm_up=5, dtype="float32"
    )
    return replace(config, **changes)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"), layers=3)


@pytest.fixture(scope="module")
def data(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data"), target, shards=2)


@pytest.fixture(scope="module")
def trained(target: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("trained") / "head"
    return folder, train(training(target, data, folder), quiet)


def features_of(target: Path) -> FeatureTarget:
    return FeatureTarget({"pretrained_model_name_or_path": str(target)}, None, "cpu", 500)


def test_features_are_the_hidden_states_that_transformers_reports(target: Path, data: Path) -> None:
    taps, module = features_of(target), AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    assert taps.layers == (2, 1, 3)
    sequences = ShardFolder(data).read(1)[:9]
    for one, features in zip(sequences, taps.features(sequences), strict=True):
        own = torch.from_numpy(np.concatenate((one.prompt, one.answer)).astype(np.int64))[None]
        last: list[torch.Tensor] = []
        handle = module.model.norm.register_forward_pre_hook(lambda _, args, last=last: last.append(args[0]))
        with torch.inference_mode():
            states = module(own, output_hidden_states=True).hidden_states
        handle.remove()
        wanted = torch.cat([states[2], states[1], last[0]], -1)[0]
        torch.testing.assert_close(features.float(), wanted, rtol=0.02, atol=0.02)


def test_a_head_trained_for_seconds_agrees_with_its_target_far_more_than_chance(trained: tuple[Path, Any]) -> None:
    _, report = trained
    shares = report["held_out_agreement"]
    assert shares[0] > 0.3 and len(shares) == 3 and shares[0] >= shares[2]


def test_training_cut_short_resumes_to_the_same_weights(
    target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(training(target, data, tmp_path / "whole", epochs=2), quiet)
    one, done = HeadTraining.train_group, []

    def stops(self: HeadTraining, group: list[int]) -> None:
        if len(done) == 7:
            raise KeyboardInterrupt
        one(self, group)
        done.append(group)
        self.save()

    monkeypatch.setattr(HeadTraining, "train_group", stops)
    with pytest.raises(KeyboardInterrupt):
        train(training(target, data, tmp_path / "cut", epochs=2), quiet)
    assert (tmp_path / "cut" / "training_state.pt").is_file()
    monkeypatch.setattr(HeadTraining, "train_group", one)
    said: list[str] = []
    again = train(training(target, data, tmp_path / "cut", epochs=2), said.append)
    assert "resuming from step 7" in said and again["steps"] == whole["steps"] > 7
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "cut")]
    assert weights[0] == weights[1]
    assert not (tmp_path / "cut" / "training_state.pt").exists()


def test_what_does_not_fit_is_refused_by_name(
    target: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match="holds data of the target"):
        train(replace(training(target, data, tmp_path), target_model=None), quiet)
    with pytest.raises(ValueError, match=r"layers: \[1, 2, 9\] are not three of the target's 3"):
        train(training(target, data, tmp_path, layers=(1, 2, 9)), quiet)
    assert train_main(["--data", str(tmp_path / "none"), "--output", str(tmp_path / "x"), "--steps", "0"]) == 2
    assert capsys.readouterr().err.endswith(": steps: 0 is below 1\n")


def test_training_sees_what_drafting_sees(target: Path, data: Path, trained: tuple[Path, Any]) -> None:
    """Step s of the training-time test at a row is the s-th further token of a draft, to rounding."""
    head, _ = read_head(trained[0])
    embedding = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).get_input_embeddings().weight.detach()
    one = read_data(data, weights_revision(find(str(target))))[1][0]
    (features,) = features_of(target).features([one])
    tokens = np.concatenate((one.prompt, one.answer)).tolist()
    with torch.inference_mode():
        states = head_states(head, embedding, make_batch([one], [features]), 3)
    for begin in (4, 11, 19):  # tokens known
        expected = [head.logits(states[s])[0, begin - 2 + s] for s in range(3)]
        for s, logits in enumerate(drafted_logits(head, embedding, features.float(), tokens, begin)):
            torch.testing.assert_close(logits, expected[s], rtol=1e-4, atol=1e-4)


def drafted_logits(
    head: EagleHead, embedding: torch.Tensor, features: torch.Tensor, tokens: list[int], known: int
) -> list[torch.Tensor]:
    """The logits of three draft tokens after `known` tokens, where the drafts are made to be those of the text."""
    seen: list[torch.Tensor] = []
    limits, identity = Limits(1, 64, 4, 8, 258), RunnerIdentity("head", "", "float32", "cpu", "torch")
    given = TargetFeatures(features[None], embedding)
    runner = EagleRunner(head, given, embedding, limits, identity, platform_of("cpu"))
    for start in range(0, known - 2, 8):
        runner.prefill([PrefillRow(0, start, tuple(tokens[start : min(start + 8, known - 2)]))])
    columns = {token: column for column, token in enumerate(head.token_ids.tolist())}
    logits_of = head.logits

    def forced(hidden: torch.Tensor) -> torch.Tensor:
        logits = logits_of(hidden)
        seen.append(logits[0])
        forced = torch.full_like(logits, -1.0)
        forced[:, columns[tokens[known + len(seen) - 1]]] = 1.0
        return forced

    head.logits = forced  # type: ignore[method-assign]
    try:
        runner.propose([propose_row(0, known - 1, tuple(tokens[known - 2 : known]), 3, SamplingParams())])
    finally:
        del head.logits
    return seen


@pytest.mark.thorough
async def test_the_same_commands_make_a_head_for_a_qwen(tmp_path: Path) -> None:
    folder, data, head = tmp_path / "target", tmp_path / "data", tmp_path / "head"
    byte_tokenizer().save_pretrained(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
    module = Qwen3ForCausalLM(
        Qwen3Config(vocab_size=258, num_hidden_layers=6, eos_token_id=1, head_dim=16, **sizes)
    ).eval()
    module.save_pretrained(folder)
    shards = ShardFolder(data)
    shards.claim({"target": weights_revision(find(str(folder)))})
    shards.write(0, continuations(module, np.random.default_rng(1)))
    arguments = ["--data", str(data), "--output", str(head), "--target_model", str(folder), "--epochs", "0.3"]
    assert train_main([*arguments, "--dtype", "float16"]) == 0
    assert read_head_config(head).layers == (2, 3, 3)
    batcher, choice = Batcher("test"), DraftChoice("eagle", str(head))
    execution = Execution("cpu", "float32", compile="native")
    pair = await load_pair(ModelConfig(execution, Shape(1, 64, 2), str(folder), choice, default_k=2), batcher)
    request = GenerationRequest(text="def", max_new_tokens=6, ignore_end_of_sequence=True)
    found = await answer(fused_generator(pair[0], pair[1], 2, choice).generate, request)
    await batcher.close()
    assert found.completion.stats.drafted > 0
