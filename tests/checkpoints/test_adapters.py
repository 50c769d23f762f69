"""PEFT folders: what is read from them, and what is refused by name."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tandem.checkpoints.adapter_files import Adapter, AdapterChoice, AdapterConfig, adapter_choices, read_adapter
from tandem.checkpoints.locate import CheckpointError
from tests.adapters import write_adapter

Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"


def tensors(rank: int = 4, module: str = Q) -> dict[str, torch.Tensor]:
    key = f"base_model.model.{module}.lora_"
    return {f"{key}A.weight": torch.ones(rank, 6), f"{key}B.weight": torch.ones(8, rank)}


def read(folder: Path, values: dict[str, torch.Tensor] | None = None, **fields: Any) -> Adapter:
    return read_adapter(AdapterChoice("red", str(write_adapter(folder, values or tensors(), **fields))))


def test_an_adapter_has_two_matrices_and_a_factor_for_each_layer(tmp_path: Path) -> None:
    adapter = read(tmp_path, {name: value.bfloat16() for name, value in (tensors() | tensors(module=DOWN)).items()})
    assert (adapter.name, sorted(adapter.parts)) == ("red", [Q, DOWN])
    part = adapter.parts[Q]
    assert (tuple(part.down.shape), tuple(part.up.shape), part.rank, part.scale) == ((4, 6), (8, 4), 4, 2.0)
    assert part.down.dtype == part.up.dtype == np.float32
    assert read(tmp_path, use_rslora=True).parts[Q].scale == 8 / math.sqrt(4)


def test_ranks_and_alphas_may_differ_by_pattern(tmp_path: Path) -> None:
    patterns = {"rank_pattern": {"down_proj": 2}, "alpha_pattern": {r"layers\.1\.mlp\.down_proj": 5, "k_proj": 7}}
    adapter = read(tmp_path, tensors() | tensors(2, DOWN), **patterns)
    assert {module: (part.rank, part.scale) for module, part in adapter.parts.items()} == {Q: (4, 2.0), DOWN: (2, 2.5)}


def test_a_pattern_matches_the_end_of_a_path_from_a_dot_on() -> None:
    """Whole names, as with PEFT: a pattern that matches anywhere gives layers another's factor, and wrong tokens."""
    config = AdapterConfig(
        4, 8, alphas={"proj": 1, "model": 2, "attn.q_proj": 3, "mlp": 4, "q_proj": 5}, ranks={"q": 1}
    )
    assert config.rank_and_scale(Q) == (4, 5 / 4) and config.rank_and_scale(DOWN) == (4, 2.0)
    assert config.rank_and_scale("attn.q_proj") == (4, 3 / 4) and config.rank_and_scale("q") == (1, 8.0)


def test_equal_files_have_equal_revisions_and_others_do_not(tmp_path: Path) -> None:
    first, same, other = (read(tmp_path / str(n), r=4, lora_alpha=alpha) for n, alpha in enumerate((8, 8, 9)))
    assert first.revision == same.revision != other.revision


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"peft_type": "IA3"}, "peft_type: 'IA3' is not served"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias: 'all'"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights: 'pissa'"),
        ({"a_field_of_next_year": 1}, "a_field_of_next_year"),
        ({"r": 0}, "r: 0"),
        ({"r": "4"}, "r: '4'"),
        ({"r": 8}, f"{Q} has rank 4, and adapter_config.json says 8"),
        ({"lora_alpha": "8"}, "lora_alpha: '8'"),
        ({"lora_alpha": float("inf")}, "'lora_alpha' is inf, not a finite number"),
        ({"lora_alpha": 10**299}, "is not a number of at most 65536"),
        ({"alpha_pattern": {"q_proj": 1e39}}, "alpha_pattern 'q_proj': 1e+39 is not a number of at most 65536"),
        ({"rank_pattern": [1]}, "rank_pattern"),
        ({"alpha_pattern": {"(": 1}}, "alpha_pattern: '(': missing )"),
        ({"alpha_pattern": {"x{99999999999}": 1}}, "alpha_pattern: 'x{99999999999}'"),
        ({"rank_pattern": {"q" * 513: 4}}, "is longer than 512 characters"),
        ({"use_rslora": "yes"}, "use_rslora: 'yes'"),
    ],
)
def test_what_is_not_served_is_refused_by_its_field(fields: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as refused:
        read(tmp_path, **fields)
    assert said in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"base_model.model.lm_head.modules_to_save.weight": torch.ones(2, 2)}, "modules_to_save"),
        ({f"base_model.model.{Q}.lora_magnitude_vector": torch.ones(2)}, "lora_magnitude_vector"),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(2, 2)}, "lora_embedding_A"),
        ({f"base_model.model.{Q}.lora_A.weight": torch.ones(4, 6)}, f"{Q} has lora_A alone"),
        (tensors() | {f"base_model.model.{Q}.lora_B.weight": torch.ones(8, 3)}, "share no rank"),
        (tensors() | {f"base_model.model.{Q}.lora_B.weight": torch.full((8, 4), math.nan)}, "not finite"),
        (tensors() | {f"base_model.model.{Q}.lora_A.weight": torch.ones(4, 6, 1)}, "not a matrix"),
        (tensors() | {f"base_model.model.{Q}.lora_A.weight": torch.ones(4, 6).double() * 1e39}, "not finite"),
    ],
)
def test_tensors_that_are_no_lora_of_a_linear_layer_are_refused_by_name(
    values: dict[str, torch.Tensor], said: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError) as refused:
        read(tmp_path, values)
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_a_folder_that_is_no_adapter_says_what_it_lacks(tmp_path: Path) -> None:
    def refusal(source: Path) -> str:
        with pytest.raises(CheckpointError) as refused:
            read_adapter(AdapterChoice("red", str(source)))
        return str(refused.value)

    assert "is not a folder" in refusal(tmp_path / "none")
    assert "no adapter_config.json" in refusal(tmp_path)
    write_adapter(tmp_path, tensors())
    (tmp_path / "adapter_model.safetensors").write_bytes(b"\x20\0\0\0\0\0\0\0{}")
    assert "adapter_model.safetensors" in refusal(tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()
    assert "no adapter_model.safetensors" in refusal(tmp_path)
    (tmp_path / "adapter_config.json").write_text("[]")
    assert "not an object" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"auto_mapping": ' + b"[" * 65 + b"]" * 65 + b"}", "nested more than 64 deep"),
        (b'{"r": ' + b"1" * 5000 + b"}", "a number has 5000 digits"),
        (b'{"r": NaN}', "'r' is nan, not a finite number"),
        (b'{"r": 4, "r": 8}', "a name stands twice"),
        (b'{"r": "\xff"}', "can't decode byte"),
        (b" " * (1 << 20) + b"{}", "longer than 1048576 bytes"),
    ],
    ids=["nested", "digits", "NaN", "twice", "no UTF-8", "long"],
)
def test_a_configuration_that_is_no_plain_json_is_refused(content: bytes, said: str, tmp_path: Path) -> None:
    write_adapter(tmp_path, tensors())
    (tmp_path / "adapter_config.json").write_bytes(content)
    with pytest.raises(CheckpointError) as refused:
        read_adapter(AdapterChoice("red", str(tmp_path)))
    assert said in str(refused.value) and "\n" not in str(refused.value) and len(str(refused.value)) < 500


def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    write_adapter(tmp_path, tensors())
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        (tmp_path / name).unlink()
        os.mkfifo(tmp_path / name)
        with pytest.raises(CheckpointError, match=name):
            read_adapter(AdapterChoice("red", str(tmp_path)))


def test_adapters_are_named_on_the_command_line_once_each() -> None:
    assert adapter_choices("red=/a, blue=/b=c") == (AdapterChoice("red", "/a"), AdapterChoice("blue", "/b=c"))
    assert adapter_choices(None) == adapter_choices("") == ()
    for given, said in (("red", "red=DIR"), ("=x", "''"), ("a/b=x", "'a/b'"), ("a=x,a=y", "a is given twice")):
        with pytest.raises(ValueError, match=said):
            adapter_choices(given)
