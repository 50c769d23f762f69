"""train and evaluate of EAGLE-1 heads, and what NxD Inference's backend makes of what they write."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from tandem.checkpoints.convert import ConvertConfig, run_convert
from tandem.checkpoints.eagle1 import check_grafted
from tandem.checkpoints.locate import CheckpointError, find
from tandem.comparison.measuring.workloads import Prompt
from tandem.engine.model_config import DraftChoice, ModelConfig
from tandem.runners.loading import Execution, Shape
from tandem.runners.nxdi.load import _planned_pair
from tandem.runners.nxdi.settings import NxdiSettings
from tandem.runners.torch.backend import BACKEND
from tandem.training.heads.eagle1 import evaluate as evaluation
from tandem.training.heads.eagle1.evaluate import Eagle1Evaluation, continued, evaluate, hidden_states
from tandem.training.heads.eagle1.loop import Eagle1Training
from tandem.training.heads.eagle1.loss import eagle1_loss, make_eagle1_batch
from tandem.training.heads.eagle1.module import Eagle1Head, head_config, read_eagle1
from tandem.training.heads.eagle1.rounds import Rounds, drafted, rounds_along
from tandem.training.heads.eagle1.train import frozen, train
from tandem.training.heads.eagle1.train import main as train_main
from tandem.training.shards import TrainingSequence
from tests.training.eagle1_pair import make_data, make_target, training
from tests.training.test_heads import quiet


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def data(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data"), target)


@pytest.fixture(scope="module")
def trained(target: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("trained") / "head"
    return folder, train(training(target, data, folder), quiet)


def test_a_head_trained_for_seconds_guesses_its_targets_tokens(trained: tuple[Path, dict[str, Any]]) -> None:
    folder, report = trained
    everything = report["held_out"]["all"]
    assert everything["by_position"][0] > 0.4 and everything["tokens_per_round"] > 1.4
    assert set(report["held_out"]) >= {"all"} and (folder / "training.json").is_file()


def test_the_file_has_the_published_tensors_alone(trained: tuple[Path, dict[str, Any]]) -> None:
    names = set(load_file(trained[0] / "model.safetensors"))
    attention = {f"layers.0.self_attn.{name}_proj.weight" for name in "qkvo"}
    mlp = {f"layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
    assert names == {"fc.weight", "layers.0.post_attention_layernorm.weight", *attention, *mlp}
    config = json.loads((trained[0] / "config.json").read_text())
    assert (config["model_type"], config["num_hidden_layers"], config["fc_bias"]) == ("llama", 1, False)
    assert config["rope_theta"] == 10000.0 and "rope_parameters" not in config


def test_what_training_writes_passes_the_graft_and_nxdis_checks(
    target: Path, trained: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    run_convert(ConvertConfig(trained[0], tmp_path / "draft", "eagle", target))
    check_grafted(tmp_path / "draft", 32, 258, normed_inputs=False)
    settings = NxdiSettings(compiled_dir=str(tmp_path), eagle=True)
    pair = (find(str(target)), find(str(tmp_path / "draft")))
    build, own, other, wanted = _planned_pair(*pair, Execution(), Shape(2, 64, 4), settings)
    assert build.eagle and own.vocab_size == other.vocab_size == 258 and other.model_type == "llama"
    assert "with EAGLE" in wanted.made_from["what"]
    with pytest.raises(CheckpointError, match=r"no lm_head\.weight; --role convert"):
        _planned_pair(pair[0], find(str(trained[0])), Execution(), Shape(2, 64, 4), settings)
    for folder in (trained[0], tmp_path / "draft"):
        assert torch.equal(read_eagle1(folder).fc.weight, load_file(trained[0] / "model.safetensors")["fc.weight"])
    with pytest.raises(CheckpointError, match="an EAGLE-1 head, which NxD Inference alone serves"):
        config = ModelConfig(Execution("cpu"), Shape(), str(target), DraftChoice("model", str(tmp_path / "draft")))
        BACKEND.load(BACKEND.find(config.draft.model), config.load_request(), None)  # type: ignore[arg-type]


@torch.no_grad()
def test_the_head_computes_the_published_formula(target: Path) -> None:
    """Nothing of ours computes what is expected: fc, a layer without an input norm, no last norm."""
    module: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    torch.manual_seed(1)
    head = Eagle1Head(head_config(module.config))
    own, tokens = head.state_dict(), torch.arange(60, 71)
    states = module.model(tokens[None]).last_hidden_state
    embeds = module.model.embed_tokens.weight[tokens[1:]]
    x = torch.cat((embeds, states[0, :-1]), -1) @ own["fc.weight"].T
    q, k, v = ((x @ own[f"layers.0.self_attn.{n}_proj.weight"].T).unflatten(-1, (-1, 8)) for n in "qkv")
    q, k = turned(q), turned(k)
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / 8**0.5
    weights = scores.masked_fill(torch.ones(10, 10, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
    attended = torch.einsum("hqk,khd->qhd", weights, v).flatten(1)
    out = x + attended @ own["layers.0.self_attn.o_proj.weight"].T
    y = F.rms_norm(out, (32,), own["layers.0.post_attention_layernorm.weight"], module.config.rms_norm_eps)
    gate, up, down = (own[f"layers.0.mlp.{n}_proj.weight"].T for n in ("gate", "up", "down"))
    out = out + (F.silu(y @ gate) * (y @ up)) @ down
    torch.testing.assert_close(head(embeds[None], states[:, :-1])[0], out, atol=1e-4, rtol=1e-4)


def turned(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions of x [n, heads, 8]."""
    angles = torch.arange(len(x))[:, None] * 10000.0 ** (-torch.arange(4) / 4)
    cosines, sines = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x[..., :4], x[..., 4:]
    return torch.cat([a * cosines - b * sines, b * cosines + a * sines], -1)


def test_rows_learn_the_next_hidden_state_and_what_it_says(target: Path) -> None:
    module: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).requires_grad_(False)
    own = frozen(module, [2], "cpu")
    empty, tokens = np.zeros((0, 1), np.int32), np.arange(50, 60, dtype=np.int32)
    one = TrainingSequence("code", 0.0, tokens[:4], tokens[4:], empty, empty.astype(np.float16))
    hidden = module.model(torch.from_numpy(tokens.astype(np.int64))[None]).last_hidden_state[0]
    batch = make_eagle1_batch([(one, hidden)])
    assert batch.at.tolist() == list(range(2, 8)), "the last row predicts the last answered token's hidden state"

    class Knows(Eagle1Head):
        def forward(self, embeds: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
            return batch.hidden[:, 1:]

    found = eagle1_loss(Knows(head_config(module.config)), own, batch)
    assert float(found.regression) == 0.0 and bool(found.hits.all())
    entropy = torch.distributions.Categorical(logits=hidden[3:9] @ own.output.T).entropy().mean()
    torch.testing.assert_close(found.classification, entropy)


def test_the_features_of_the_last_layer_give_the_hidden_state_after_the_last_norm(target: Path) -> None:
    module: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).requires_grad_(False)
    caught: list[torch.Tensor] = []
    module.model.norm.register_forward_pre_hook(lambda _, args: caught.append(args[0]))
    states = module.model(torch.arange(60, 70)[None]).last_hidden_state[0]
    before = caught[0][0]
    features = torch.cat((torch.zeros_like(before), before, torch.ones_like(before)), -1)
    torch.testing.assert_close(frozen(module, [1, 2, 1], "cpu").hidden(features), states)
    with pytest.raises(
        ValueError, match=r"reads the last, 2; run tandem\.training\.heads\.features with --layers 1,1,2"
    ):
        frozen(module, [1, 1, 1], "cpu")


def test_rounds_count_what_a_server_would_accept(target: Path, trained: tuple[Path, dict[str, Any]]) -> None:
    module: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).requires_grad_(False)
    own, head = frozen(module, [2], "cpu"), read_eagle1(trained[0])
    tokens = continued(module, [60, 61, 62], 20, "cpu")
    hidden = hidden_states(module, tokens, own)
    expected, known = Rounds(3), 3
    while known < len(tokens):
        drafts = drafted(head, own, tokens[:known], hidden, min(3, len(tokens) - known))
        accepted = next((i for i, d in enumerate(drafts) if d != tokens[known + i]), len(drafts))
        expected.add(len(drafts), accepted, min(accepted + 1, len(tokens) - known))
        known += accepted + 1
    found = rounds_along(head, own, tokens, hidden, 3, 3)
    assert found == expected and found.tokens == len(tokens) - 3 and found.rounds < found.tokens
    counted = Rounds(3)
    for drafts_made, accepted, committed in ((3, 1, 2), (3, 3, 4), (1, 0, 1)):
        counted.add(drafts_made, accepted, committed)
    assert (counted.drafted, counted.accepted) == ([3, 2, 2], [2, 1, 1])
    assert counted.by_position == [0.6667, 0.5, 0.5] and counted.tokens_per_round == 2.3333


def test_drafts_do_not_depend_on_hidden_states_that_are_not_known(
    target: Path, trained: tuple[Path, dict[str, Any]]
) -> None:
    module: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).requires_grad_(False)
    own, head = frozen(module, [2], "cpu"), read_eagle1(trained[0])
    tokens = list(range(60, 70))
    hidden = hidden_states(module, tokens, own)
    drafts = drafted(head, own, tokens, hidden, 4)
    hidden[9:] = torch.nan
    assert drafted(head, own, tokens, hidden, 4) == drafts


def test_training_cut_short_resumes_to_the_same_weights(
    target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(training(target, data, tmp_path / "whole", epochs=3), quiet)
    one, done = Eagle1Training._one, []

    def stops(self: Eagle1Training, group: list[int]) -> None:
        if len(done) == 5:
            raise KeyboardInterrupt
        one(self, group)
        done.append(group)
        self.save()

    monkeypatch.setattr(Eagle1Training, "_one", stops)
    with pytest.raises(KeyboardInterrupt):
        train(training(target, data, tmp_path / "cut", epochs=3), quiet)
    monkeypatch.setattr(Eagle1Training, "_one", one)
    said: list[str] = []
    again = train(training(target, data, tmp_path / "cut", epochs=3), said.append)
    assert "resuming from step 5" in said and again["steps"] == whole["steps"] > 5
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "cut")]
    assert files[0] == files[1] and not (tmp_path / "cut" / "training_state.pt").exists()


def test_evaluate_measures_every_kind_and_writes_the_card(
    target: Path, trained: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    head = shutil.copytree(trained[0], tmp_path / "head")
    prompts = (Prompt("a", "code", "def", False), Prompt("b", "prose", "The", False))
    found = evaluate(Eagle1Evaluation(head, str(target), prompts, k=3, max_new_tokens=30), quiet)
    assert list(found["kinds"]) == ["all", "code, raw", "prose, raw"]
    assert found["kinds"]["all"]["tokens_per_round"] > 1.3, "no better than chance"
    assert json.loads((head / "acceptance.json").read_text()) == found
    card = (head / "README.md").read_text()
    assert "EAGLE-1 head" in card and "| prose, raw |" in card and "not run on Trainium" in card
    with pytest.raises(ValueError, match="was trained for"):
        evaluate(Eagle1Evaluation(head, None, prompts), quiet)
    assert evaluation.main(["--draft_model", str(tmp_path), "--target_model", str(target)]) == 2


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--batch", "0"], "batch: 0 is below 1"),
        (["--noise", "-1"], "noise: -1.0 is below 0"),
        (["--regression", "0", "--classification", "0"], "regression: it and classification are both 0"),
        (["--dtype", "int8"], "dtype: 'int8' is not one of"),
        (["--epochs", "0"], "epochs: 0.0 is not above 0"),
    ],
)
def test_what_does_not_fit_is_one_line(
    tmp_path: Path, words: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_main(["--data", str(tmp_path), "--output", str(tmp_path / "x"), *words]) == 2
    assert capsys.readouterr().err.startswith(f"train: {why}")
