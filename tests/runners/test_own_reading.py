"""Native steps without torch: the weights and tables that they have are those of transformers' modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from tandem.checkpoints.family_configs import UnsupportedFamily, family_of, table
from tandem.checkpoints.family_weights import FolderWeights, GgufWeights, check_complete
from tandem.checkpoints.head_config import read_head_weights
from tandem.checkpoints.locate import EMBEDDED_DRAFT, EMBEDDED_HEAD, CheckpointError, find
from tandem.checkpoints.numbers import Stored, from_bfloat16, to_bfloat16
from tandem.runners.eagle.load_head import load_head
from tandem.runners.eagle.module import head_module
from tandem.runners.load_runner import Execution, Shape, load_runner
from tandem.runners.native.load_native import load_native
from tandem.runners.native.native_runner import NativeRunner
from tandem.runners.native.rotary import rotary_tables
from tandem.runners.native.weights import packing
from tandem.runners.startup import Startup
from tests.runners import real
from tests.runners.modules import ModuleWeights, native_of, stored_of, weights_of
from tests.runners.test_native import LLAMA3, SIZES, module_of, native, sequence
from tests.runners.tiny import model_folder

_UNSUPPORTED = ("models", "activation", "differ", "rotary")
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 100000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn with boundaries": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "mscale": 1.0, "mscale_all_dim": 0.7},
    "yarn with a factor of attention": {**YARN, "truncate": False, "attention_factor": 1.3},
}


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_tables_are_the_cosines_and_sines_of_transformers(rope: dict[str, Any]) -> None:
    """To the last place, of an angle too: torch's kernels are one off there, by the CPU."""
    module = module_of(rope_parameters=dict(rope), max_position_embeddings=4096, head_dim=64)
    wanted = module.model.rotary_emb(torch.zeros(1, 1), torch.arange(4096)[None])
    config = family_of(module.config.to_dict())
    for ours, theirs in zip(rotary_tables(config.ropes[0], 64, 4096, "float32"), wanted, strict=True):
        assert (np.abs(ours - theirs[0, :, :32].numpy()).max(1) <= 2e-7 * (1 + np.arange(4096))).all()


@pytest.mark.parametrize("kind", table()["native"])
def test_fields_that_are_absent_have_the_defaults_of_transformers(kind: str) -> None:
    sizes = {name: SIZES[name] for name in ("vocab_size", "hidden_size", "intermediate_size")}
    sizes |= {"num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096}
    ours = family_of({"model_type": kind, **sizes})
    theirs: Any = transformers.AutoConfig.for_model(kind, **sizes)
    for field in ("num_key_value_heads", "tie_word_embeddings", "max_position_embeddings"):
        assert getattr(ours, field) == getattr(theirs, field), field
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 128)
    assert ours.rms_norm_eps == (getattr(theirs, "rms_norm_eps", None) or theirs.layer_norm_eps)
    assert ours.hidden_act == (getattr(theirs, "hidden_activation", None) or theirs.hidden_act)
    window = getattr(theirs, "sliding_window", None) or 0
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * 32
    own = theirs.rope_parameters
    by_kind = {each: own.get(each, own) for each in ("full_attention", "sliding_attention")}
    turning = getattr(theirs, "no_rope_layers", None) or [kind != "exaone4" or each[0] == "s" for each in kinds]
    for layer, each in enumerate(kinds):
        rope = ours.rope_of(layer)
        assert turning[layer] == (rope >= 0)
        assert rope < 0 or {"partial_rotary_factor": 1.0, **ours.ropes[rope]}.items() >= by_kind[each].items()
    wanted = [window if each == "sliding_attention" else 0 for each in kinds]
    assert list(ours.windows or [0] * 32) == wanted
    assert list(ours.eos) == ([] if theirs.eos_token_id is None else [theirs.eos_token_id])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "models of type gpt2"),
        ({"model_type": None}, "models of type None"),
        ({"hidden_act": "relu2"}, "activation relu2"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "differ by layer"),
        ({"attention_multiplier": 0.5}, "models of type llama with attention_multiplier 0.5"),
        ({"rope_parameters": {"mrope_section": [2, 2, 4]}}, "rotary embeddings with mrope_section"),
        ({"rope_parameters": [1]}, r"rope_parameters: \[1\] is not an object"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers: '2' is not a whole number above 0"),
        ({"num_key_value_heads": 4}, "num_key_value_heads: 4 do not divide 6 heads"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps: 'small' is not a number"),
        ({"eos_token_id": "x"}, "eos_token_id: 'x' is not a token id"),
        ({"hidden_size": 10**20}, "hidden_size: 100000000000000000000 is not a whole number above 0"),
        ({"head_dim": None, "hidden_size": 47}, "hidden_size: 47 is not a multiple of 6 heads"),
    ],
)
def test_a_configuration_that_is_not_served_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        family_of({"model_type": "llama", **SIZES, **changes})
    assert isinstance(caught.value, UnsupportedFamily) == (message.split()[0] in _UNSUPPORTED)


def test_weights_that_are_missing_or_of_another_shape_are_named(tmp_path: Path) -> None:
    module = module_of("qwen2")
    module.save_pretrained(tmp_path / "m")
    for change, message in (
        ("model.layers.1.mlp.up_proj.weight", "weights lack model.layers.1.mlp.up_proj.weight"),
        ("model.layers.0.self_attn.q_proj.bias", "weights lack model.layers.0.self_attn.q_proj.bias"),
    ):
        weights = ModuleWeights(module)
        del weights._tensors[change]
        with pytest.raises(CheckpointError, match=message):
            check_complete(weights)
    weights = ModuleWeights(module)
    weights._tensors["model.norm.weight"] = torch.ones(7)
    with pytest.raises(CheckpointError, match=r"model.norm.weight is \[7\], not \[48\]"):
        check_complete(weights)


def test_weights_that_are_replaced_while_they_are_packed_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model_folder(tmp_path / "m", seed=5)

    def replaced(*given: Any) -> NativeRunner:
        runner = load_native(*given)
        model_folder(folder, seed=6)
        return runner

    monkeypatch.setattr("tandem.runners.native.load_native.load_native", replaced)
    with pytest.raises(CheckpointError, match="m: was replaced or written to while it was read"):
        load_runner(find(str(folder)), Execution("cpu", "float32", 1), Shape(1, 64, 2))


def same_bits(ours: NativeRunner, theirs: NativeRunner) -> None:
    """Whether two models have the same packed bytes: all of them decide about the logits of these tokens."""
    assert ours.model.weight_bytes == theirs.model.weight_bytes
    tokens = [token % ours.model.vocab_size for token in sequence(40)]
    assert np.array_equal(ours.model.feed([0], [0], [tokens]), theirs.model.feed([0], [0], [tokens]))  # type: ignore[arg-type]


FORMATS = (("auto", "float32"), ("auto", "bfloat16"), ("int8", "float32"), ("int8", "bfloat16"), ("q4", "float32"))


@pytest.mark.each_value
@pytest.mark.parametrize(("weights", "dtype"), FORMATS)
@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float16])
def test_a_folders_weights_are_packed_as_those_that_torch_loads(
    weights: str, dtype: str, kept: torch.dtype, tmp_path: Path
) -> None:
    module_of("llama with biases, no shared heads, a tied head", kept).save_pretrained(tmp_path)
    runner = load_runner(find(str(tmp_path)), Execution("cpu", dtype, 1, weights=weights), Shape(3, 120, 5))
    module = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=getattr(torch, dtype))
    packed = packing(weights)
    assert isinstance(runner, NativeRunner) and runner.identity.dtype == packed.describe(dtype)
    if weights == "auto" or dtype == "float32":  # else quantised from what the file has, not from its rounding
        same_bits(runner, native(module, packing=packed))
    for name, parameter in module.named_parameters():
        ours = FolderWeights(tmp_path).stored(name).to(dtype).values
        assert np.array_equal(ours, stored_of(parameter).values), name


@pytest.mark.thorough
def test_the_embedded_models_have_the_weights_that_torch_loads() -> None:
    """As stored, dequantised, the draft's cut head, and the head: bit for bit."""
    target, module = (
        GgufWeights(Path(str(find(None).gguf_file))),
        AutoModelForCausalLM.from_pretrained(real.checkpoint().folder),
    )
    for name, parameter in module.named_parameters():
        assert np.array_equal(target.stored(name).floats(), parameter.detach().numpy()), name
    runner = load_runner(find(None), Execution("cpu", threads=2), Shape(3, 120, 5))
    as_stored = packing("as-stored", target.blocks)
    limits, identity = runner.limits, runner.identity
    assert identity.dtype == "q4_1+q8_0/float32" and isinstance(runner, NativeRunner)
    same_bits(runner, native_of(module, 2, limits, identity, True, None, as_stored))
    draft = load_runner(find(str(EMBEDDED_DRAFT)), Execution("cpu", "bfloat16"), Shape(3, 120, 5), verifies=False)
    small = AutoModelForCausalLM.from_pretrained(EMBEDDED_DRAFT, dtype=torch.bfloat16)
    only = None if draft.model.draft_vocab is None else draft.model.draft_vocab.tolist()  # type: ignore[attr-defined]
    assert only and isinstance(draft, NativeRunner)
    same_bits(draft, native_of(small, 1, draft.limits, draft.identity, False, only))
    weights, _ = read_head_weights(EMBEDDED_HEAD)
    again = weights_of(head_module(EMBEDDED_HEAD, weights))
    assert all(np.array_equal(each.values, again.tensors[name].values) for name, each in weights.tensors.items())
    assert load_head(find(str(EMBEDDED_HEAD)), runner, Startup()).identity.dtype == "int8/float32"


def test_bfloat16_is_rounded_as_torch_rounds_it() -> None:
    every = np.arange(2**16, dtype=np.uint16)
    assert np.array_equal(from_bfloat16(every), torch.from_numpy(every).view(torch.bfloat16).float().numpy(), True)
    drawn = np.random.default_rng(1).integers(0, 2**32, 10**6, dtype=np.uint32).view(np.float32)
    numbers = drawn[~np.isnan(drawn)]
    theirs = torch.from_numpy(numbers).to(torch.bfloat16).view(torch.uint16).numpy()
    assert np.array_equal(to_bfloat16(numbers), theirs) and len(numbers) > 990_000
    assert np.isnan(from_bfloat16(to_bfloat16(drawn[np.isnan(drawn)]))).all()


@pytest.mark.parametrize(("dtype", "kind"), [("F8_E4M3", torch.float8_e4m3fn), ("F8_E5M2", torch.float8_e5m2)])
def test_bytes_in_fp8_are_those_of_torch(dtype: str, kind: torch.dtype) -> None:
    every = np.arange(256, dtype=np.uint8)
    theirs = torch.from_numpy(every).view(kind).float().numpy()
    assert np.array_equal(Stored(dtype, every).floats(), theirs, equal_nan=True)
