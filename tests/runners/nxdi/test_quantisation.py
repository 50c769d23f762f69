"""What NxD Inference would quantise is settled, and what it could not load refused, before anything compiles."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tandem.checkpoints.locate import CheckpointError
from tandem_nxdi import quantisation
from tandem_nxdi.nxdi_settings import NxdiSettings, draft_apart
from tests.runners.nxdi import simulated
from tests.runners.nxdi.runners import Bench, application, bench  # noqa: F401
from tests.support import REPOSITORY

MLP_KERNEL: dict[str, Any] = {"quantized_mlp_kernel_enabled": True, "modules_to_not_convert": ["lm_head"]}
MATRIX = np.ones((2, 2), np.float32)


def rewrite(folder: Path, *modules: str, scaled: bool) -> None:
    """Gives a checkpoint these matrices, with scales beside them or without."""
    tensors = {f"{module}.weight": MATRIX for module in modules}
    scales = {f"{module}.weight_scale": MATRIX[:, :1] for module in modules} if scaled else {}
    save_file(tensors | scales, folder / "model.safetensors")


def given(**fields: Any) -> dict[str, Any]:
    return {"neuron_config": MLP_KERNEL | fields}


def test_the_draft_of_a_quantised_target_stays_as_its_weights_are(bench: Bench) -> None:  # noqa: F811
    rewrite(bench.model(), "model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj", scaled=True)
    names = ("model.layers.0.mlp.up_proj", "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj")
    rewrite(bench.model(miss=0.3), *names, scaled=False)
    bench.pair(**given(rmsnorm_quantize_kernel_enabled=True))
    draft = application().config.fused_spec_config.draft_config.neuron_config.given
    kept = ["layers.0.mlp", "layers.0.self_attn", "layers.1.mlp", "lm_head"]
    assert draft["modules_to_not_convert"] == kept
    assert not draft.keys() & {"quantized", "quantized_mlp_kernel_enabled", "rmsnorm_quantize_kernel_enabled"}
    assert application().neuron_config.given["modules_to_not_convert"] == ["lm_head"]


def test_a_list_that_leaves_a_draft_modules_without_scales_is_refused(bench: Bench) -> None:  # noqa: F811
    rewrite(bench.model(), "model.layers.0.mlp.up_proj", scaled=True)
    rewrite(bench.model(miss=0.3), "model.layers.0.mlp.up_proj", "model.layers.15.mlp.up_proj", scaled=False)
    with pytest.raises(CheckpointError, match=r"would quantise layers\.15\.mlp\.up_proj, whose weights have no scales"):
        bench.pair(**given(draft_model_modules_to_not_convert=["lm_head", "layers.0.mlp"]))
    assert not simulated.COMPILED
    rewrite(bench.model(miss=0.3), "model.layers.0.mlp.up_proj", scaled=True)
    bench.pair(**given(draft_model_modules_to_not_convert=["lm_head"]))
    assert simulated.COMPILED


def test_a_target_whose_scales_are_missing_or_would_be_left_unread_is_refused(bench: Bench) -> None:  # noqa: F811
    rewrite(bench.model(), *(f"model.layers.{n}.mlp.up_proj" for n in range(5)), scaled=False)
    with pytest.raises(CheckpointError, match=r"layers\.2\.mlp\.up_proj and 2 more, whose weights have no scales here"):
        bench.target(**given())
    rewrite(bench.model(), "model.layers.0.mlp.up_proj", scaled=True)
    with pytest.raises(CheckpointError, match="have scales, which modules_to_not_convert would leave unread"):
        bench.target(**given(modules_to_not_convert=["layers.0.mlp"]))
    assert not simulated.COMPILED


def test_a_draft_apart_keeps_no_quantisation_of_its_targets() -> None:
    apart = draft_apart(NxdiSettings(neuron_config={**MLP_KERNEL, "fused_qkv": True}))
    assert apart.neuron_config == {"fused_qkv": True}
    own = {"quantized": True, "quantized_checkpoints_path": "its"}
    kept = draft_apart(NxdiSettings(neuron_config=MLP_KERNEL, draft_neuron_config=own)).neuron_config
    assert kept["quantized_checkpoints_path"] == "its"


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        (json.loads((REPOSITORY / "docs/recipes/llama-405b-fp8.json").read_text(encoding="utf-8")), True),
        ({"quantized": True, "quantization_dtype": "f8e4m3fn"}, True),
        ({"quantized": True, "quantization_dtype": "f8e5m2"}, True),
        ({"kv_cache_quant": True}, True),
        ({"quantized": True, "quantization_dtype": "int8"}, False),
        ({}, False),
    ],
    ids=["the recipe of 405B", "f8e4m3fn", "f8e5m2", "the cache", "int8", "none"],
)
def test_whatever_is_of_eight_bit_floats_gets_its_variables(fields: dict[str, Any], wanted: bool) -> None:
    assert bool(quantisation.fp8_environment(fields)) is wanted


def test_the_variables_of_fp8_are_set_and_are_part_of_what_was_compiled(
    bench: Bench,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rewrite(bench.model(), "model.layers.0.mlp.up_proj", scaled=True)
    for name in quantisation.FP8_VARIABLES:
        monkeypatch.setenv(name, "1")
        monkeypatch.delenv(name)
    bench.target(**given())
    assert {name: os.environ.get(name) for name in quantisation.FP8_VARIABLES} == quantisation.FP8_VARIABLES
    monkeypatch.setenv("UNSAFE_FP8FNCAST", "0")  # an operator's own value stays, and is another build
    bench.target(**given())
    assert os.environ["UNSAFE_FP8FNCAST"] == "0" and len(simulated.COMPILED) == 2
