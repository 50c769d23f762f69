"""Converted checkpoints, by value."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tandem.checkpoints.convert import check_completed
from tandem.checkpoints.locate import CheckpointError
from tandem.checkpoints.tensors import Tensors
from tandem.cli import main
from tests.checkpoints.heads import CONFIG, eagle1_folder, eagle1_tensors, eagle3_folder, eagle3_tensors
from tests.runners.modules import read_head
from tests.runners.tiny import model_folder

FACTOR = 448 / 240
SIZES = {"hidden_size": 8, "vocab_size": 10}


def folder(path: Path, tensors: dict[str, Tensor], **config: object) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    (path / "tokenizer.json").write_text("{}")
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def quantized(seed: int = 0) -> dict[str, Tensor]:
    """A layer in OCP's E4M3 with a scale for each output, as the FP8 checkpoint of Llama-3.1-405B has it."""
    torch.manual_seed(seed)
    weight = torch.randn(32, 64) * torch.logspace(-3, 1, 32)[:, None]
    scale = weight.abs().amax(1, keepdim=True) / 448
    return {
        "model.layers.1.mlp.up_proj.weight": (weight / scale).to(torch.float8_e4m3fn),
        "model.layers.1.mlp.up_proj.weight_scale": scale,
        "model.layers.1.input_layernorm.weight": torch.ones(64, dtype=torch.bfloat16),
    }


def convert(*words: str) -> int:
    return main.main(["--role", "convert", *words])


def test_fp8_weights_fit_neurons_range_and_stay_the_same_times_their_scale(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = quantized()
    source = folder(tmp_path / "ocp", before, quantization_config={"quant_method": "fbgemm_fp8"})
    assert convert("--convert", "fp8", "--model", str(source), "--output", str(tmp_path / "neuron")) == 0
    said = capsys.readouterr().out
    assert "1 FP8 weights rescaled" in said
    after = load_file(tmp_path / "neuron" / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    assert after[name].dtype == torch.float8_e4m3fn and after[name].float().abs().max() == 240
    old, new = (each[name].float() * each[f"{name}_scale"] for each in (before, after))
    assert torch.equal(after[f"{name}_scale"], before[f"{name}_scale"] * FACTOR)
    assert ((new - old).abs() <= old.abs() / 16 + before[f"{name}_scale"] * 2**-9 * FACTOR).all()
    assert (new - old).abs().max() > 0, "three bits of mantissa cannot hold every product"
    # One rounding: every weight is the nearest that E4M3 has.
    assert torch.equal(after[name].float(), (before[name].double() / FACTOR).to(torch.float8_e4m3fn).float())
    assert torch.equal(after["model.layers.1.input_layernorm.weight"], before["model.layers.1.input_layernorm.weight"])
    assert json.loads((tmp_path / "neuron" / "config.json").read_text())["quantization_config"]
    assert (tmp_path / "neuron" / "tokenizer.json").is_file()


def test_what_is_not_ocp_fp8_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    small = quantized() | {name: (quantized()[name].float() / 2).to(torch.float8_e4m3fn)}
    lonely = quantized() | {"model.layers.2.mlp.up_proj.weight": quantized()[name].clone()}
    for case, (tensors, why) in enumerate(
        (
            (small, "is within ±240 already; it looks rescaled"),
            ({name: torch.ones(4, 4)}, "no weight has a scale beside it"),
            (lonely, "model.layers.2.mlp.up_proj.weight is FP8 without a scale of its own"),
        )
    ):
        source = folder(tmp_path / f"s{case}", tensors)
        assert convert("--convert", "fp8", "--model", str(source), "--output", str(tmp_path / f"o{case}")) == 2
        assert why in capsys.readouterr().err
        assert not (tmp_path / f"o{case}" / "config.json").exists(), "what is not finished is no model"


def completed(tmp_path: Path, head: Path, target: Path) -> int:
    """Completes a head in out/."""
    words = ("--draft_model", str(head), "--target_model", str(target), "--output", str(tmp_path / "out"))
    return convert("--convert", "eagle", *words)


def target_folder(path: Path, layers: int = 8, tied: bool = False) -> Path:
    tensors = {"model.embed_tokens.weight": torch.randn(10, 8)} | (
        {} if tied else {"lm_head.weight": torch.randn(10, 8)}
    )
    return folder(path, tensors, **SIZES, num_hidden_layers=layers)


@pytest.mark.parametrize(("tied", "pickled"), [(False, True), (True, False)])
def test_an_eagle_head_gets_the_targets_output_matrix(tmp_path: Path, tied: bool, pickled: bool) -> None:
    head, target = eagle1_tensors(), target_folder(tmp_path / "target", tied=tied)
    assert completed(tmp_path, eagle1_folder(tmp_path / "head", head, pickled), target) == 0
    made, theirs = (load_file(each / "model.safetensors") for each in (tmp_path / "out", target))
    table = theirs["model.embed_tokens.weight"].half()
    assert torch.equal(made["lm_head.weight"], table if tied else theirs["lm_head.weight"].half())
    assert torch.equal(made["embed_tokens.weight"], table)
    assert all(torch.equal(made[name], tensor) for name, tensor in head.items())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["fc_bias"] is False and config["num_hidden_layers"] == 1 and config["tie_word_embeddings"] is False
    check_completed(tmp_path / "out", SIZES, normed_inputs=False)


def test_what_a_head_has_of_its_own_is_kept_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = {"layers.0.input_layernorm.weight": torch.ones(8), "fc.bias": torch.ones(8)}
    head, output = eagle1_tensors(vocabulary=10) | own, tmp_path / "out"
    assert completed(tmp_path, eagle1_folder(tmp_path / "head", head), target_folder(tmp_path / "target")) == 0
    assert "serve it with enable_eagle_draft_input_norm true" in capsys.readouterr().out
    made = load_file(output / "model.safetensors")
    assert torch.equal(made["embed_tokens.weight"], head["embed_tokens.weight"])
    assert json.loads((output / "config.json").read_text())["fc_bias"] is True
    check_completed(output, SIZES, normed_inputs=True)
    with pytest.raises(CheckpointError, match=r"has layers\.0\.input_layernorm\.weight: set enable_eagle_draft_in"):
        check_completed(output, SIZES, normed_inputs=False)


@pytest.mark.parametrize(("drafted", "layout"), [(4, "specforge"), (10, "speculators")])
def test_an_eagle3_head_is_written_under_llamas_names_for_the_whole_vocabulary(
    tmp_path: Path, drafted: int, layout: str
) -> None:
    """A token that the head cannot draft never has the largest logit; those that it can have the logits of before."""
    tensors = eagle3_tensors(drafted=drafted, layer="midlayer" if layout == "specforge" else "layers.0")
    config = {} if layout == "specforge" else {"speculators_model_type": "eagle3", "transformer_layer_config": CONFIG}
    source = eagle3_folder(tmp_path / "head", tensors, norm_before_residual=False, **config)
    target, output = target_folder(tmp_path / "target"), tmp_path / "out"
    assert completed(tmp_path, source, target) == 0
    made, theirs = (load_file(each / "model.safetensors") for each in (output, target))
    assert not [name for name in made if "midlayer" in name or name in ("d2t", "t2d")]
    matrix, states = made["lm_head.weight"].double(), torch.randn(1000, 8, dtype=torch.float64)
    ids = torch.arange(drafted) * (2 if drafted == 4 else 1)
    assert torch.equal(made["lm_head.weight"][ids], tensors["lm_head.weight"])
    assert torch.equal((states @ matrix.T).argmax(1), ids[(states @ tensors["lm_head.weight"].double().T).argmax(1)])
    assert torch.equal(made["embed_tokens.weight"], theirs["model.embed_tokens.weight"].half())
    check_completed(output, {**SIZES, "num_hidden_layers": 8}, normed_inputs=True)
    assert read_head(output)[0].config.draft_vocab_size == 10, "what is written is a head that other backends read too"


WHOLE, THREE = eagle1_tensors(), eagle3_tensors()
OTHER: tuple[tuple[dict[str, Tensor], dict[str, object], str], ...] = (
    (eagle1_tensors(12), {"hidden_size": 12}, "hidden_size: 12, and the target's lm_head.weight has 8"),
    (WHOLE | {"lm_head.weight": torch.ones(10, 8)}, {}, "has lm_head.weight already"),
    ({"layers.0.w": torch.ones(1)}, {}, "no fc.weight: not an EAGLE-1 head"),
    ({"fc.weight": WHOLE["fc.weight"]}, {}, "the head lacks midlayer.mlp.down_proj.weight"),
    (WHOLE | {"d2t": torch.ones(4)}, {}, "the head has d2t, which EAGLE-1 heads do not have"),
    (
        THREE,
        {"eagle_aux_hidden_state_layer_ids": [1, 4, 5]},
        "hands out those after [2, 4, 5] alone; train one with --la",
    ),
    (THREE, {"norm_before_residual": True}, "norm_before_residual: true: NxD Inference computes false"),
    (THREE, {"draft_vocab_size": 5}, "d2t is [4], not [5] as config.json has it"),
    (THREE, {"vocab_size": 12}, "vocab_size: 12, and the target's embed_tokens.weight has 10 rows"),
    (THREE | {"d2t": torch.tensor([0, 1, 0, 1])}, {}, "d2t does not name 4 tokens of 10"),
    (THREE, {"layers": 6}, "the target has 6; NxD Inference reads three layers for an EAGLE-3 head, of 7 or more"),
)


@pytest.mark.parametrize("case", range(len(OTHER)))
def test_a_head_that_does_not_fit_is_refused_by_name(
    tmp_path: Path, case: int, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors, config, why = OTHER[case]
    make = eagle3_folder if tensors.keys() >= THREE.keys() else eagle1_folder
    target = target_folder(tmp_path / "target", int(str(config.get("layers", 8))))
    assert completed(tmp_path, make(tmp_path / "head", tensors, **config), target) == 2
    assert why in capsys.readouterr().err
    assert not (tmp_path / "out" / "config.json").exists()


def test_pytorchs_files_become_safetensors_of_the_size_asked_for(tmp_path: Path) -> None:
    """transformers loads the same model from them."""
    source = model_folder(tmp_path / "model", 1)
    weights = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    torch.save(weights, source / "pytorch_model.bin")
    words = ("--model", str(source), "--output", str(tmp_path / "out"), "--shard_gb", "0.00002")
    assert convert("--convert", "safetensors", *words) == 0
    files = [load_file(file) for file in (tmp_path / "out").glob("*.safetensors")]
    assert len(files) > 3 and not list((tmp_path / "out").glob("*.bin"))
    assert all(len(f) == 1 or sum(t.nbytes for t in f.values()) <= 20_000 for f in files)
    assert set(Tensors(tmp_path / "out").files) == set(weights)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(loaded[name], weight) for name, weight in weights.items())


def test_arguments_that_do_not_fit_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = str(folder(tmp_path / "m", quantized()))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    for line, why in (
        (f"--convert fp4 --model {source} --output {tmp_path}/o", "convert: 'fp4' is not one of fp8, eagle, safe"),
        (f"--convert fp8 --model {source} --output {tmp_path}/full", "is not an empty folder"),
        (f"--convert fp8 --model {source}", "output: give --output DIR"),
        (f"--convert fp8 --model {tmp_path}/none --output {tmp_path}/o", "not a model folder with a config.json"),
        (f"--convert eagle --model {source} --output {tmp_path}/o", "model: --convert eagle takes --draft_model"),
    ):
        assert convert(*line.split()) == 2
        assert why in capsys.readouterr().err, line
