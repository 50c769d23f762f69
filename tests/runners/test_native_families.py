"""Native steps of every family that they have: logits and tokens of transformers, in every format and any company."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.checkpoints.family_configs import UnsupportedFamily, read_family
from tandem.checkpoints.locate import CheckpointError, find
from tandem.runners.load_runner import Execution, Shape, load_runner
from tandem.runners.native import NativeUnavailable
from tandem.runners.native.native_runner import NativeRunner
from tandem.runners.native.packed_model import check
from tandem.runners.native.weights import packing
from tests.runners.test_native import FAMILY, LIMITS, VOCAB, check_bits, made_module, native, sequence
from tests.runners.test_native import SIZES as SMALL

SIZES = {
    **{"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 90, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.3},
    **{"bos_token_id": None, "eos_token_id": None, "pad_token_id": None},
}
LONG = {
    **{"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75},
    **{"short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]},
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral, a window": ("mistral", {"sliding_window": 7}),
    "a window of one position": ("mistral", {"sliding_window": 1}),
    "ministral": (
        "ministral",
        {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"] * 2, "head_dim": 32},
    ),
    "qwen2, windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 18, "max_window_layers": 2}),
    "qwen3, windows": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "head_dim": 32},
    ),
    "llama, yarn beyond its length": ("llama", {"rope_parameters": YARN, "max_position_embeddings": 32}),
    "llama, dynamic": ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": 64}),
    "llama, GELU": ("llama", {"hidden_act": "gelu"}),
    "gemma": ("gemma", {"head_dim": 32}),
    "gemma2": ("gemma2", {"head_dim": 32, "sliding_window": 9, "query_pre_attn_scalar": 24}),
    "gemma3": (
        "gemma3_text",
        {"head_dim": 32, "sliding_window": 21, "sliding_window_pattern": 3, "final_logit_softcapping": 20.0},
    ),
    "gemma3, linear": (
        "gemma3_text",
        {"head_dim": 16, "sliding_window": 9, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ),
    "phi3, a window": ("phi3", {"sliding_window": 19}),
    "phi3, longrope, long": ("phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 64}),
    "phi3, longrope, short": ("phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 128}),
    "smollm3": ("smollm3", {}),
    "smollm3, windows": ("smollm3", {"use_sliding_window": True, "sliding_window": 11, "no_rope_layer_interval": 2}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {"sliding_window": 13}),
    "granite": (
        "granite",
        {
            **{"embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22},
            **{"attention_multiplier": 0.2, "attention_bias": True},
        },
    ),
    "stablelm": ("stablelm", {"use_qkv_bias": True}),
    "seed_oss": ("seed_oss", {"head_dim": 32, "attention_out_bias": True}),
    "exaone4": ("exaone4", {"sliding_window": 10, "sliding_window_pattern": 2}),
    "exaone4 without windows": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
}
KINDS = {name: (kind, SIZES | own) for name, (kind, own) in KINDS.items()}
KINDS |= {f"small {name}": (kind, SMALL | own) for name, (kind, own) in FAMILY.items()}
every_kind = pytest.mark.parametrize("name", KINDS)


def module_of(name: str, dtype: torch.dtype = torch.float32) -> Any:
    kind, fields = KINDS[name]
    return made_module(kind, dtype, fields)


def theirs_of(module: Any, tokens: list[int]) -> Any:
    with torch.inference_mode():
        return module(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float().numpy()


def far(ours: Any, theirs: Any) -> float:
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs - theirs.mean()))


def fed(runner: NativeRunner, tokens: list[int], slot: int = 1, most: int = 60) -> Any:
    """Logits of tokens that are fed in chunks."""
    chunks = [runner.model.feed([slot], [at], [tokens[at : at + most]]) for at in range(0, len(tokens), most)]
    return np.concatenate(chunks)  # type: ignore[arg-type]


@every_kind
def test_logits_are_those_of_transformers_beyond_windows_and_contexts(name: str) -> None:
    module, tokens = module_of(name), sequence(LIMITS.max_length)
    assert far(fed(native(module), tokens), theirs_of(module, tokens)) < 1e-5


@every_kind
def test_logits_in_bfloat16_are_as_near_to_float32_as_those_of_transformers(name: str) -> None:
    module, tokens = module_of(name, torch.bfloat16), sequence(LIMITS.max_length)
    ours, theirs, true = fed(native(module), tokens), theirs_of(module, tokens), theirs_of(module.float(), tokens)
    assert far(ours, true) < 1.1 * far(theirs, true)


@pytest.mark.each_value
@every_kind
@pytest.mark.parametrize("weights", ["auto", "int8", "q4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_tokens_bits_depend_on_no_company_or_number_of_threads(name: str, weights: str, dtype: torch.dtype) -> None:
    module = module_of(name, dtype)
    check_bits(*(native(module, threads=threads, packing=packing(weights)) for threads in (2, 1, 3)))


@pytest.mark.parametrize("weights", ["int8", "q4"])
def test_matrices_that_a_folder_has_fused_are_quantised_by_their_rows(weights: str, tmp_path: Path) -> None:
    module, tokens = module_of("phi3, a window"), sequence(50)
    module.save_pretrained(tmp_path)
    runner = load_runner(find(str(tmp_path)), Execution("cpu", "float32", 2, weights=weights), Shape(3, 120, 5))
    assert isinstance(runner, NativeRunner)
    assert np.array_equal(fed(runner, tokens), fed(native(module, packing=packing(weights)), tokens))


def test_a_tensor_that_no_layer_uses_is_refused_by_name(tmp_path: Path) -> None:
    module_of("mistral, a window").save_pretrained(tmp_path)
    file, name = tmp_path / "model.safetensors", "model.layers.0.self_attn.q_proj.bias"
    save_file({**load_file(file), name: torch.zeros(64)}, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"weights have {name}, which a model of type mistral does not use"):
        load_runner(find(str(tmp_path)), Execution("cpu", "float32", 1), Shape(1, 64, 2))


@pytest.mark.parametrize(
    ("kind", "changes", "field"),
    [
        ("mistral", {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping 30.0"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
        ("stablelm", {"qk_layernorm": True}, "qk_layernorm True"),
        ("qwen3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor 0.5",
        ),
        ("stablelm", {"use_parallel_residual": True}, "parallel"),
    ],
)
def test_a_field_that_native_steps_do_not_use_is_refused_by_name(
    kind: str, changes: dict[str, Any], field: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, "model_type": kind, **changes}))
    with pytest.raises((UnsupportedFamily, NativeUnavailable), match=field):
        check(read_family(tmp_path), "float32")
