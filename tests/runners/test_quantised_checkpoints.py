"""Checkpoints that are quantised already, and those that are quantised once: by value."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.checkpoints.locate import CheckpointError, find
from tandem.checkpoints.scaled_weights import ScaledWeights, quantisation_of
from tandem.runners.load_runner import Execution, Shape, load_runner
from tandem.runners.native import weights as native_weights
from tandem.runners.native.native_runner import NativeRunner
from tandem.runners.native.weights import packing
from tests.daily import daily
from tests.runners.test_native import module_of, native, sequence
from tests.runners.test_quantised import distance, one_by_one, with_rounded_inputs

SIZES = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 32, "num_attention_heads": 4}
FP8 = torch.float8_e4m3fn


def compressed(kind: str, strategy: str, **more: object) -> dict[str, Any]:
    """A quantization_config as llm-compressor writes it."""
    weights = {"num_bits": 8, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False, **more}
    activations = {"num_bits": 8, "type": kind, "strategy": "token", "symmetric": True, "dynamic": True}
    return {
        **{"quant_method": "compressed-tensors", "quantization_status": "compressed", "ignore": ["lm_head"]},
        "format": "int-quantized" if kind == "int" else "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": activations}},
        **{"kv_cache_scheme": None, "sparsity_config": {}, "transform_config": {}, "version": "0.12.2"},
    }


# What config.json says; the size of the tiles that have a scale (0: all); the numbers; the dtype of scales.
KINDS: dict[str, tuple[dict[str, Any], tuple[int, int], torch.dtype, torch.dtype]] = {
    "int8 channel": (compressed("int", "channel"), (1, 0), torch.int8, torch.bfloat16),
    "int8 tensor": (compressed("int", "tensor"), (0, 0), torch.int8, torch.bfloat16),
    "int8 group": (compressed("int", "group", group_size=64), (1, 64), torch.int8, torch.bfloat16),
    "float channel": (compressed("float", "channel"), (1, 0), FP8, torch.float32),
    "float block": (compressed("float", "block", block_structure=[64, 32]), (64, 32), FP8, torch.bfloat16),
    "fbgemm": ({"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]}, (1, 0), FP8, torch.float32),
    "fp8 tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, (0, 0), FP8, torch.float32),
    "fp8 block": ({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [64, 64]}, (64, 64), FP8, torch.float32),
}
INT8 = [kind for kind in KINDS if kind.startswith("int8")]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(native_weights, "cache_root", lambda: tmp_path / "cache")
    return tmp_path / "cache"


def saved(folder: Path, kind: str, change: Callable[[dict[str, torch.Tensor]], object] = lambda tensors: None) -> Any:
    """Writes a quantised Qwen3 of 2 layers into `folder`; returns the module of the weights that it means."""
    config, tile, numbers, scales = KINDS[kind]
    name_of_scale = "weight_scale_inv" if kind == "fp8 block" else "weight_scale"
    module = module_of("qwen3", **SIZES)
    # The head is not quantised. Blocks of Q8_0 have its weights exactly, so that int8 changes nothing.
    q8_0 = gguf.GGMLQuantizationType.Q8_0
    head = gguf.quants.dequantize(gguf.quants.quantize(module.lm_head.weight.detach().numpy(), q8_0), q8_0)
    module.lm_head.weight.data = torch.from_numpy(head)
    made = {}
    for name, linear in module.model.layers.named_modules():
        if not isinstance(linear, torch.nn.Linear):
            continue
        weight, place = linear.weight.data, f"model.layers.{name}"
        rows, columns = (size or extent for size, extent in zip(tile, weight.shape, strict=True))
        most = 127.0 if numbers is torch.int8 else 448.0
        scale = torch.tensor(
            [
                [weight[r : r + rows, c : c + columns].abs().max() / most for c in range(0, weight.shape[1], columns)]
                for r in range(0, weight.shape[0], rows)
            ]
        ).to(scales)
        spread = torch.kron(scale.float(), torch.ones(rows, columns))[: weight.shape[0], : weight.shape[1]]
        stored = (weight / spread).clamp(-most, most)
        stored = (stored.round() if numbers is torch.int8 else stored).to(numbers)
        linear.weight.data = stored.float() * spread
        made |= {f"{place}.weight": stored, f"{place}.{name_of_scale}": scale if tile != (0, 0) else scale.reshape(1)}
    module.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors") | made
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((folder / "config.json").read_text()) | {"quantization_config": config}
    (folder / "config.json").write_text(json.dumps(settings))
    return module


def loaded(folder: Path, weights: str = "auto", dtype: str = "float32", compile: str = "auto") -> Any:
    execution = Execution("cpu", dtype, 2, compile, weights=weights)
    return load_runner(find(str(folder)), execution, Shape(3, 120, 5))


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_the_numbers_times_their_scales(kind: str, tmp_path: Path) -> None:
    module = saved(tmp_path / "m", kind)
    runner = loaded(tmp_path / "m", "float32")
    assert runner.identity.dtype == "float32"
    assert distance(runner, module, sequence(60)) < 1e-5
    weights, name = ScaledWeights(tmp_path / "m"), "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(weights[name], module.get_parameter(name))


@pytest.mark.parametrize("kind", daily(INT8, 0))
def test_int8_checkpoints_run_in_int8_with_their_own_numbers(kind: str, tmp_path: Path) -> None:
    module = saved(tmp_path / "m", kind)
    runner = loaded(tmp_path / "m")
    assert isinstance(runner, NativeRunner) and runner.identity.dtype == "int8/float32"
    assert one_by_one(runner, with_rounded_inputs(module)) < 2e-6
    weights, name = ScaledWeights(tmp_path / "m"), "model.layers.0.self_attn.q_proj.weight"
    blocks = weights.blocks(name)
    assert blocks is not None and np.array_equal(
        gguf.quants.dequantize(blocks.rows, gguf.GGMLQuantizationType.Q8_0), weights[name].numpy()
    )


def test_fp8_checkpoints_run_in_any_format(tmp_path: Path) -> None:
    module = saved(tmp_path / "m", "fbgemm")
    assert loaded(tmp_path / "m").identity.dtype == "float32"
    for weights, most in (("int8", 0.1), ("q4", 0.6)):
        runner = loaded(tmp_path / "m", weights)
        assert runner.identity.dtype == f"{weights}/float32"
        assert 1e-4 < distance(runner, module, sequence(60)) < most


def test_module_code_runs_the_same_weights(tmp_path: Path) -> None:
    module = saved(tmp_path / "m", "int8 channel")
    runner = loaded(tmp_path / "m", compile="off")
    name = "model.layers.1.self_attn.v_proj.weight"
    assert runner.identity.dtype == "float32"
    assert torch.equal(ScaledWeights(tmp_path / "m")[name], module.get_parameter(name))
    native_runner = loaded(tmp_path / "m", "float32")
    tokens = sequence(20)
    theirs = runner.model.forward([0], torch.tensor([tokens]), torch.tensor([0]))[0].numpy()
    assert np.allclose(theirs, native_runner.model.feed([0], [0], [tokens]), atol=1e-3)


@pytest.mark.parametrize("weights", ["int8", "q4"])
def test_weights_are_quantised_once_and_the_same_as_without_a_cache(
    weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = module_of()
    module.save_pretrained(tmp_path / "m")
    first = loaded(tmp_path / "m", weights).model.feed([0], [0], [sequence(40)])

    def never(*_: object) -> None:
        raise AssertionError("quantised again")

    with monkeypatch.context() as patched:
        patched.setattr(native_weights, "encoded", never)
        again = loaded(tmp_path / "m", weights).model.feed([0], [0], [sequence(40)])
    uncached = native(module, packing=packing(weights)).model.feed([0], [0], [sequence(40)])
    assert np.array_equal(first, again) and np.array_equal(first, uncached)


def test_weights_that_are_replaced_while_they_are_quantised_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module_of().save_pretrained(tmp_path / "m")
    other, write = module_of(name="qwen3"), native_weights._write

    def replaced(*arguments: Any) -> None:
        write(*arguments)
        other.save_pretrained(tmp_path / "m")

    with monkeypatch.context() as patched:
        patched.setattr(native_weights, "_write", replaced)
        with pytest.raises(CheckpointError, match="was replaced or written to while it was read"):
            loaded(tmp_path / "m", "int8")
    again = loaded(tmp_path / "m", "int8").model.feed([0], [0], [sequence(40)])
    assert np.array_equal(again, native(other, packing=packing("int8")).model.feed([0], [0], [sequence(40)]))


def test_without_a_cache_weights_are_quantised_at_every_start(tmp_path: Path, cache: Path) -> None:
    module_of().save_pretrained(tmp_path / "m")
    cache.write_text("a file where the folder should be")
    assert loaded(tmp_path / "m", "int8").identity.dtype == "int8/float32"


def of_group(strategy: str = "channel", **changes: object) -> dict[str, Any]:
    return compressed("int", strategy, **changes)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quantization_config.quant_method: 'gptq' is not compressed-tensors"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "quantization_config.fmt: 'e5m2' is not e4m3"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size: \[128\] is not two sizes"),
        (
            of_group() | {"format": "pack-quantized"},
            "quantization_config.format: 'pack-quantized' is not int-quantized",
        ),
        (of_group() | {"quantization_status": "frozen"}, "quantization_status: 'frozen' is not compressed"),
        (of_group() | {"sparsity_config": {"format": "24-bitmask"}}, "sparsity_config.format: '24-bitmask'"),
        (of_group() | {"transform_config": {"u": {}}}, "transform_config: transforms of activations"),
        (of_group() | {"config_groups": {}}, "config_groups: names no group"),
        (of_group() | {"config_groups": {"g": 3}}, "config_groups.g: 3 is not an object"),
        (of_group(num_bits=4), "config_groups.group_0.weights.num_bits: 4 is not 8"),
        (of_group(symmetric=False), "config_groups.group_0.weights.symmetric: False is not True"),
        (of_group(actorder="group"), "config_groups.group_0.weights.actorder: 'group' is not None or weight"),
        (of_group(strategy="token"), "config_groups.group_0.weights.strategy: 'token' is not tensor or channel"),
        (of_group(strategy="group"), "config_groups.group_0.weights.group_size: None is not a whole number above 0"),
    ],
)
def test_what_is_not_supported_is_refused_by_the_name_of_its_field(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    with pytest.raises(CheckpointError, match=message) as raised:
        quantisation_of(tmp_path)
    assert "\n" not in str(raised.value)


def test_quantised_weights_without_their_configuration_are_refused(tmp_path: Path) -> None:
    saved(tmp_path / "m", "int8 channel")
    file = tmp_path / "m" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": None}))
    for weights in ("auto", "int8"):
        with pytest.raises(CheckpointError, match=r"_proj\.weight is (I8|int8), and config\.json has no quantization"):
            loaded(tmp_path / "m", weights)


SCALE = "model.layers.0.mlp.up_proj.weight_scale"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(SCALE), "up_proj.weight is int8, and there is no model.layers.0.mlp.up_proj.weight_scale"),
        (
            lambda t: t.update({SCALE: t[SCALE][:7].clone()}),
            r"weight_scale is \(7, 1\): not what config.json says of int8",
        ),
        (lambda t: t.update({SCALE: t[SCALE].float() * 1e9}), "the scales of .*up_proj.weight are not within float16"),
        (lambda t: t.pop(SCALE.replace("up", "gate").removesuffix("_scale")), "weights lack model.layers.0.mlp.gate"),
    ],
)
def test_scales_that_are_missing_or_do_not_fit_are_refused(
    change: Callable[[dict[str, torch.Tensor]], object], message: str, tmp_path: Path
) -> None:
    saved(tmp_path / "m", "int8 channel", change)
    with pytest.raises(CheckpointError, match=message):
        loaded(tmp_path / "m")
